"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    checkpoint_format as checkpoint_format,
    families as families,
    positions as positions,
    table as table,
)
