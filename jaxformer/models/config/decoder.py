"""Config of the decoder-only Transformer."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.models.config.check import check_at_least, check_not_empty
from jaxformer.models.config.needs import Has
from jaxformer.models.config.transformer import TransformerConfig

LayerType = Literal["attention", "short_convolution"]
_CONVOLVES = Has("layer_types", "short_convolution")
_NEEDS = {
    **TransformerConfig.needs,
    "convolution_kernel_size": (_CONVOLVES,),
    "convolution_bias": (_CONVOLVES,),
}


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """Config of a decoder-only Transformer.

    `resolved` replaces a size that is None by its value, computed from the other fields.
    """

    patterns = (*TransformerConfig.patterns, "window", "layer_types")
    needs = _NEEDS

    window: int | tuple[int | None, ...] | None = None
    """a token attends to itself and to the window − 1 tokens before it; None: to all before it"""
    prefix: int = 0
    """number of first tokens of a document that attend to one another in both directions
    (prefix-LM)"""
    layer_types: LayerType | tuple[LayerType, ...] = "attention"
    """which sub-layer of a layer reads other tokens: attention, or a gated causal convolution
    (short_convolution, LFM2)"""
    convolution_kernel_size: int = 3
    """short convolutions: number of tokens that a token reads, itself included"""
    convolution_bias: bool = False
    """short convolutions: biases of the convolution and of its linear layers"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_not_empty(self, "window", "layer_types")
        check_at_least(1, self, "window", "convolution_kernel_size")
        check_at_least(0, self, "prefix")
        if self.prefix > self.max_length:
            raise ValueError(f"prefix is {self.prefix}; it must be in 0 … {self.max_length}")
