"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import (
    checkpoint_format as checkpoint_format,
    families as families,
    positions as positions,
    table as table,
)
