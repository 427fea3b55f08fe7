"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import (
    byte_tokenizer as byte_tokenizer,
    checkpoint as checkpoint,
    run as run,
)
