"""Execution options of a model: attention implementation, layer loop and rematerialisation."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from jaxformer.models.config.check import check_fields
from jaxformer.models.config.needs import Needs, Spelling, any_of, is_one_of

_TRANSFORMER = is_one_of("model", "decoder", "encoder", "encoder-decoder")
# The option "auto" unrolls at most this many layers. Unrolled training steps were 1.35, 1.18, 1.03
# and 1.00 times as fast as scanned steps at 6, 12, 24 and 48 layers. The longer compilation of
# unrolled steps paid off after 5, 128 and 184 steps at 6, 12 and 24 layers. It never paid off at 48
# layers (bench_layers.py).
_MOST_UNROLLED = 24


@dataclass(frozen=True)
class Execution:
    """Execution options of a model.

    These options do not change the parameters, and change the outputs only by rounding. The options
    apply to forward passes over whole sequences, to passes with a cache and to the compiled steps
    of `generate`. In decoding (`init_cache`, `extend`, `generate`, `beam_search`, `score`),
    attention="fused" becomes "auto", because the fused kernels do not support decoding steps.
    """

    needs: ClassVar[Needs] = {
        "attention_implementation": (any_of(_TRANSFORMER, is_one_of("attends", True)),),
    }

    attention: Annotated[
        Literal["auto", "explicit", "blockwise", "fused"], Spelling("attention_implementation")
    ] = "auto"
    """attention implementation: explicit computes all scores at once; blockwise computes them in
    blocks of queries and needs less memory; fused is cuDNN or tokamax on a GPU and splash on a TPU
    (decoding uses auto instead); auto is fused where that is supported, else blockwise"""
    layers: Annotated[Literal["auto", "scan", "unrolled"], Spelling("scan_layers")] = "auto"
    """scan compiles one block and loops over the layers; unrolled compiles every block; auto:
    unrolled up to 24 layers and in decoding steps, else scan"""
    remat: Literal["none", "dots", "full"] = "none"
    """activations that the backward pass recomputes to save memory: none, all except matrix
    products (dots), or whole blocks (full)"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)

    @property
    def for_decoding(self) -> "Execution":
        """Execution options for decoding, with attention "auto" in place of "fused"."""
        return replace(self, attention="auto") if self.attention == "fused" else self

    def scans(self, num_layers: int, few_tokens: bool) -> bool:
        """Returns whether a scan runs the layers.

        Args:
            num_layers: The number of layers.
            few_tokens: Whether the forward pass is a decoding step.
        """
        if self.layers == "auto":
            return num_layers > _MOST_UNROLLED and not few_tokens
        return self.layers == "scan"
