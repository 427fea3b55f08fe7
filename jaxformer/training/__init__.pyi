"""Modules of this package that the documentation uses. Python imports each on first use."""

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
