"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import (
    attention as attention,
    examine as examine,
    exchange as exchange,
    targets as targets,
)
