"""The modules of the room that the documentation uses, which are imported on first use."""

from . import (
    batch as batch,
    config as config,
    data as data,
    evaluate as evaluate,
    fit as fit,
    mesh as mesh,
    objectives as objectives,
    optimizer as optimizer,
    step as step,
)
