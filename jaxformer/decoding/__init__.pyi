"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    fill as fill,
    loop_cache as loop_cache,
    steps as steps,
    translate as translate,
)
