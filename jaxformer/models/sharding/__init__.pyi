"""The modules of the room that the documentation uses, which are imported on first use."""

from . import parameters as parameters
