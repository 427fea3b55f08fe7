"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    config as config,
    kinds as kinds,
    parameters as parameters,
    sharding as sharding,
)
