"""Formats of other libraries, read and written: Hugging Face and GGUF."""
