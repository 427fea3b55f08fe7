"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import (
    config as config,
    kinds as kinds,
    parameters as parameters,
    sharding as sharding,
)
