"""How a model is run."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.models.config.check import one_of

# Layers. Unrolled, training steps were 1.35, 1.18, 1.03 and 1.00 times as fast at 6, 12, 24 and 48
# layers, and their compilation won back after 5, 128, 184 steps and never (bench_layers.py).
_MOST_UNROLLED = 24


@dataclass(frozen=True)
class Execution:
    """How a model is run: this changes neither its parameters nor, but for rounding, its values. It
    holds on every path: whole rows, a chunk with a cache, the compiled steps of `generate`."""

    attention: Literal["auto", "explicit", "blockwise", "fused"] = "auto"
    """auto: cuDNN's fused kernel on a GPU where it can, else query block by query block"""
    layers: Literal["auto", "scan", "unrolled"] = "auto"
    """scan compiles one block; unrolled compiles each; auto: unrolled up to 24 layers, and in steps
    of decoding. Layers of an RNN or CNN are always unrolled"""
    remat: Literal["none", "dots", "full"] = "none"
    """what the backward pass recomputes: nothing; all but matrix products; whole blocks"""

    def __post_init__(self):
        one_of(self)

    def scans(self, num_layers: int, few_tokens: bool) -> bool:
        """Whether so many layers are run by a scan; few_tokens: for a step of decoding."""
        if self.layers == "auto":
            return num_layers > _MOST_UNROLLED and not few_tokens
        return self.layers == "scan"
