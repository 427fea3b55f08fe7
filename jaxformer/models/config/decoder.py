"""Config of decoder-only Transformers."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxformer.models.config.check import check_at_least, check_not_empty, entries
from jaxformer.models.config.needs import all_of, any_of, is_one_of
from jaxformer.models.config.transformer import TransformerConfig

LayerType = Literal["attention", "short_convolution", "gated_delta"]
_CONVOLVES = is_one_of("layer_types", "short_convolution")
_HAS_DELTA = is_one_of("layer_types", "gated_delta")


class DeltaSizes(NamedTuple):
    """Numbers of heads and widths for the gated delta rule, with defaults in place of None."""

    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int


_NEEDS = {
    **TransformerConfig.needs,
    "norm_epsilon": (any_of(all_of(*TransformerConfig.needs["norm_epsilon"]), _HAS_DELTA),),
    "convolution_kernel_size": (any_of(_CONVOLVES, _HAS_DELTA),),
    "convolution_bias": (_CONVOLVES,),
    **dict.fromkeys(DeltaSizes._fields, (_HAS_DELTA,)),
}


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """Config of a decoder-only Transformer.

    `resolved` replaces each size that is None by a value computed from the other fields.
    """

    patterns = (*TransformerConfig.patterns, "window", "layer_types")
    needs = _NEEDS

    window: int | tuple[int | None, ...] | None = None
    """a token attends to itself and to the window − 1 tokens before it; default: to all earlier
    tokens"""
    prefix: int = 0
    """number of first tokens of a document that attend to one another in both directions
    (prefix-LM)"""
    layer_types: LayerType | tuple[LayerType, ...] = "attention"
    """sub-layer with which a layer combines tokens: attention, a gated causal convolution
    (short_convolution, LFM2), or the gated delta rule (gated_delta, Qwen3-Next)"""
    convolution_kernel_size: int = 3
    """number of tokens that the kernel covers, in short convolutions and in the convolution before
    the gated delta rule"""
    convolution_bias: bool = False
    """short convolutions: biases of the convolution and of its linear layers"""
    delta_key_heads: int | None = None
    """gated delta rule: number of query and key heads; each one serves delta_value_heads /
    delta_key_heads value heads; default: delta_value_heads"""
    delta_value_heads: int | None = None
    """gated delta rule: number of value heads, each with a memory; default: num_heads, rounded up
    to a multiple of delta_key_heads"""
    delta_key_dim: int | None = None
    """gated delta rule: width of a query and of a key; default: head_dim"""
    delta_value_dim: int | None = None
    """gated delta rule: width of a value; default: head_dim"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_not_empty(self, "window", "layer_types")
        check_at_least(1, self, "window", "convolution_kernel_size", *DeltaSizes._fields)
        check_at_least(0, self, "prefix")
        if self.prefix > self.max_length:
            raise ValueError(f"prefix is {self.prefix}; it must be in 0 … {self.max_length}")
        sizes = self.delta_sizes
        if sizes.delta_value_heads % sizes.delta_key_heads:
            raise ValueError(
                f"delta_key_heads is {sizes.delta_key_heads}; it must divide delta_value_heads "
                f"({sizes.delta_value_heads})"
            )

    @property
    def delta_sizes(self) -> DeltaSizes:
        """The values of `DeltaSizes` for this config."""
        unit, head_dim = self.delta_key_heads or 1, self.sizes.head_dim
        value_heads = self.delta_value_heads or unit * -(-self.num_heads // unit)
        return DeltaSizes(
            self.delta_key_heads or value_heads,
            value_heads,
            self.delta_key_dim or head_dim,
            self.delta_value_dim or head_dim,
        )

    @property
    def heads(self) -> tuple[int, ...]:
        """See `ModelConfig`. The last entries count the heads of the gated delta rule."""
        return *super().heads, *(self.delta_sizes[:2] if self._has_delta else ())

    @property
    def _has_delta(self) -> bool:
        return "gated_delta" in entries(self.layer_types)

    @property
    def open_fields(self) -> dict[str, Any]:
        """See `ModelConfig`. If no layer uses the gated delta rule, its fields remain None."""
        return super().open_fields | (self.delta_sizes._asdict() if self._has_delta else {})
