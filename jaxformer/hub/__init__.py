"""Import and export of models in the formats of Hugging Face, and export to GGUF."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)
