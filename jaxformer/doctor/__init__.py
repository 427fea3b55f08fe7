"""Memory, communication and minimum time of programs, compiled for devices that may be absent."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach_stub(__name__, __file__)
