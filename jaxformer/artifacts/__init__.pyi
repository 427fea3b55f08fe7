"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    byte_tokenizer as byte_tokenizer,
    checkpoint as checkpoint,
    run as run,
)
