"""Modules of this package that the documentation uses. Python imports each on first use."""

from . import (
    fill as fill,
    loop_cache as loop_cache,
    steps as steps,
    translate as translate,
)
