"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    attention as attention,
    examine as examine,
    exchange as exchange,
    targets as targets,
)
