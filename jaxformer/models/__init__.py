"""Flax modules of the models, their configs, and the sharding of their parameters."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)
