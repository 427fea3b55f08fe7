"""How a model is run."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.models.config.check import one_of


@dataclass(frozen=True)
class Execution:
    """How a model is run: this changes neither its parameters nor, but for rounding, its values."""

    attention: Literal["auto", "explicit", "blockwise", "fused"] = "auto"
    """auto: cuDNN's fused kernel on a GPU where it can, else query block by query block"""
    layers: Literal["scan", "unrolled"] = "scan"
    """scan compiles one block; unrolled compiles each (often faster on a GPU)"""
    remat: Literal["none", "dots", "full"] = "none"
    """what the backward pass recomputes: nothing; all but matrix products; whole blocks"""

    def __post_init__(self):
        one_of(self)
