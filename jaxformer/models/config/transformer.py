"""Base class of the Transformer configs, and the scaling of rotary frequencies."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from jaxformer.models.config.check import (
    check_at_least,
    check_fields,
    check_fraction,
    check_not_empty,
    check_positive,
    entries,
    shown,
)
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, all_of, any_of, is_above, is_given, is_one_of

Plain = Literal["relu", "gelu", "gelu_tanh", "silu", "squared_relu", "sigmoid", "tanh"]
Activation = Literal[Plain, "swiglu", "geglu", "geglu_tanh", "clipped_swiglu"]
Norm = Literal["layer", "rms", "rms_one_plus", "dynamic_tanh", "none"]
Positions = Literal[
    "learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "alibi", "none"
]

_LINEAR_BIASES = ("query_key_value_bias", "attention_output_bias", "feedforward_bias")
_BIASED = is_one_of("norm", "layer", "dynamic_tanh")
_NORMED = is_one_of("norm", *get_args(Norm)[:-1])
_ROUTED = is_above("num_experts", 0)
_NEEDS = {
    **dict.fromkeys(("experts_per_token", "expert_dim", "normalize_router"), (_ROUTED,)),
    **dict.fromkeys(("router_bias", "shared_expert_dim"), (_ROUTED,)),
    "shared_expert_gate": (_ROUTED, is_given("shared_expert_dim")),
    "mlp_dim": (any_of(is_one_of("num_experts", 0), is_one_of("expert_dim", None)),),
    "use_bias": (
        any_of(
            *(is_one_of(name, None) for name in _LINEAR_BIASES),
            all_of(is_one_of("norm_bias", None), _BIASED),
        ),
    ),
    **dict.fromkeys(("norm_position", "embedding_norm", "query_key_norm"), (_NORMED,)),
    "norm_epsilon": (is_one_of("norm", "layer", "rms", "rms_one_plus"),),
    "first_attention_norm": (_NORMED, is_one_of("norm_position", "pre", "sandwich")),
    "norm_bias": (_BIASED,),
    "position_offset": (is_one_of("positions", "learned"),),
    **dict.fromkeys(
        ("relative_buckets", "relative_distance"), (is_one_of("positions", "relative"),)
    ),
    **dict.fromkeys(
        ("rotary_base", "rotary_scaling", "rotary_fraction", "rotary_interleaved"),
        (is_one_of("positions", "rotary"),),
    ),
}


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies by one of three methods.

    A frequency is the angle, in radians per position, by which a pair of features is rotated. Its
    wavelength is 2π divided by the frequency, in positions.

    Reference:
        linear: Chen et al. 2023. llama3: Llama 3.1. yarn: Peng et al. 2023, §3.
    """

    needs: ClassVar[Needs] = {
        "original_length": (is_one_of("kind", "llama3", "yarn"),),
        **dict.fromkeys(
            ("low_frequency_factor", "high_frequency_factor"), (is_one_of("kind", "llama3"),)
        ),
        **dict.fromkeys(
            ("beta_fast", "beta_slow", "whole_pairs", "attention_factor"),
            (is_one_of("kind", "yarn"),),
        ),
    }

    kind: Literal["linear", "llama3", "yarn"]
    """linear divides all frequencies by factor; llama3 and yarn divide low frequencies by factor,
    keep high ones, and interpolate between the two"""
    factor: float
    """divisor of the frequencies"""
    original_length: int = 8192
    """context length, in tokens, that the model was first trained with; not used by linear"""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths above original_length / low_frequency_factor are multiplied by factor"""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths below original_length / high_frequency_factor are unchanged"""
    beta_fast: float = 32.0
    """yarn: pairs with at least this many full rotations in original_length keep their frequency"""
    beta_slow: float = 1.0
    """yarn: the frequencies of pairs with at most this many full rotations in original_length are
    divided by factor"""
    whole_pairs: bool = True
    """yarn: round the pair indices at beta_fast and beta_slow outwards to whole numbers"""
    attention_factor: float | None = None
    """yarn: factor of the rotated queries and keys; default: 0.1 ln(factor) + 1"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)
        check_at_least(1, self, "original_length")
        check_positive(self, "factor", "low_frequency_factor", "high_frequency_factor")
        check_positive(self, "beta_fast", "beta_slow", "attention_factor")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor is {self.high_frequency_factor}; it must be above "
                f"low_frequency_factor ({self.low_frequency_factor})"
            )


class Sizes(NamedTuple):
    """Sizes of a config, with defaults in place of fields that are None."""

    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    expert_dim: int
    query_key_value_bias: bool
    attention_output_bias: bool
    feedforward_bias: bool
    norm_bias: bool


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Config of a stack of Transformer blocks.

    `resolved` replaces each size that is None by a value computed from the other fields. A tuple is
    a pattern: its entries apply to successive layers, and repeat over the depth (see `layers`).
    """

    patterns = ("rotary_base", "rotary_scaling", "num_experts")
    needs = _NEEDS

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """maximum number of tokens per document, prompt and generated tokens together"""
    num_layers: int = 12
    """number of Transformer blocks"""
    embed_dim: int = 768
    """width of the residual stream"""
    num_heads: int = 12
    """number of query heads"""
    num_kv_heads: int | None = None
    """number of key and value heads; each one serves num_heads / num_kv_heads query heads;
    default: num_heads"""
    head_dim: int | None = None
    """width of one head; default: embed_dim / num_heads"""
    mlp_dim: int | None = None
    """width of the feed-forward layer's hidden features; default: 4 × embed_dim"""
    activation: Activation = "gelu_tanh"
    """activation of the feed-forward layer; swiglu, geglu, geglu_tanh and clipped_swiglu (gpt-oss)
    are gated"""
    num_experts: int | tuple[int, ...] = 0
    """number of experts of each layer. Experts are feed-forward layers, and a router chooses some
    of them for each token (Mixtral); 0: one feed-forward layer for all tokens. A pattern mixes both
    kinds of layers (Qwen2-MoE)"""
    experts_per_token: int = 2
    """number of experts that the router chooses for each token"""
    expert_dim: int | None = None
    """width of the hidden features of one expert; default: mlp_dim"""
    normalize_router: bool = True
    """divide the probabilities of a token's chosen experts by their sum"""
    router_bias: bool = False
    """add a bias to the router's logits (gpt-oss)"""
    shared_expert_dim: int | None = None
    """width of the hidden features of a shared expert, which processes every token in addition to
    the chosen experts (Qwen2-MoE); default: no shared expert"""
    shared_expert_gate: bool = False
    """multiply the shared expert's output by the sigmoid of a linear map of the token"""
    output_activation: bool = False
    """also apply the activation after the feed-forward layer's second projection (lecture 10)"""
    norm: Norm = "layer"
    """normalisation over the features: LayerNorm, RMSNorm or none; rms_one_plus is RMSNorm whose
    scale γ is stored as γ − 1 (Gemma); dynamic_tanh computes γ tanh(α x) + β instead (Zhu et al.
    2025)"""
    norm_position: Literal["pre", "post", "post_sublayer", "sandwich"] = "pre"
    """pre: norm before each sub-layer; post: after each residual sum; post_sublayer: on each
    sub-layer's output, before the sum (OLMo 2); sandwich: before each sub-layer and on its output
    (Gemma 2). All except post also have a norm after the last block"""
    parallel_block: Literal["none", "separate_norms", "shared_norm"] = "none"
    """attention and feed-forward layer read the same input and their outputs are added, with two
    separate norms (GPT-NeoX) or one shared norm (GPT-J); none: one after the other"""
    norm_epsilon: float = 1e-5
    """added to the variance inside the square root"""
    embedding_norm: bool = False
    """also normalise the embeddings, after position vectors are added"""
    residual: bool = True
    """add each sub-layer's input to its output"""
    first_attention_norm: bool = True
    """also apply the norm before the attention of the first layer (off in ModernBERT)"""
    positions: Positions = "learned"
    """position encoding: learned or sinusoidal vectors added to the embeddings (sinusoidal:
    sines and cosines alternate; sinusoidal_halves: all sines first), rotary, a learned bias of the
    attention scores for each distance (relative, T5), a bias that falls linearly with the distance
    (alibi), or none"""
    position_offset: int = 0
    """index of position 0 in the learned position table (2 in RoBERTa and BART)"""
    relative_buckets: int = 32
    """relative positions: number of distance buckets, each with one bias"""
    relative_distance: int = 128
    """relative positions: all distances of at least this many tokens share the last bucket"""
    rotary_base: float | tuple[float | None, ...] = 10_000.0
    """rotary positions: pair i of a head's features is rotated by rotary_base^(−2i / head_dim)
    radians per position; None in a pattern: no positions in this layer (SmolLM 3)"""
    rotary_scaling: RotaryScaling | tuple[RotaryScaling | None, ...] | None = None
    """rotary positions: scaling of the frequencies for longer texts, such as yarn,factor=4; the
    kinds are linear, llama3 and yarn"""
    rotary_fraction: float = 1.0
    """rotary positions: fraction of each head's features, from the first one on, that are
    rotated"""
    rotary_interleaved: bool = False
    """rotary positions: pair adjacent features (RoFormer); off: pair feature i of the first half
    with feature i of the second half (Llama)"""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """norm on the queries and keys of self-attention, before rotary positions: over each head
    separately (head) or over all heads together (all)"""
    attention_scale: float | None = None
    """factor of the attention scores; default: 1 / √head_dim"""
    attention_softcap: float | None = None
    """soft cap: a score s becomes cap · tanh(s / cap) (Gemma 2); default: no cap"""
    attention_sinks: bool = False
    """each head adds a learned score without a value to the softmax of self-attention (gpt-oss), so
    that the attention weights of a query may sum to less than 1"""
    attention_gate: bool = False
    """multiply the outputs of self-attention heads by the sigmoid of a linear map of the token,
    before the output projection (Qwen3-Next)"""
    output_scale: float | None = None
    """factor of the final hidden states before the head (T5: 1 / √embed_dim); default: 1"""
    logits_softcap: float | None = None
    """soft cap: a logit y becomes cap · tanh(y / cap); default: no cap"""
    use_bias: bool = True
    """biases in the blocks' linear layers and layer norms; query_key_value_bias,
    attention_output_bias, feedforward_bias and norm_bias override it"""
    query_key_value_bias: bool | None = None
    """biases of the query, key and value projections, and of attention_gate; default: use_bias"""
    attention_output_bias: bool | None = None
    """bias of the attention's output projection; default: use_bias"""
    feedforward_bias: bool | None = None
    """biases of the feed-forward layer; default: use_bias"""
    norm_bias: bool | None = None
    """biases of layer norms; default: use_bias"""
    head_bias: bool = False
    """add a bias to the logits"""
    tie_embeddings: bool = True
    """use the token embedding, transposed, as the output projection"""
    scale_embeddings: bool = False
    """multiply token embeddings by √embed_dim"""
    dropout: float = 0.0
    """dropout rate, on the embeddings and on each sub-layer's output, in training only"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of activations; parameters, norm statistics, logits and losses are float32"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("activation", "positions"):
            value = getattr(self, name)
            if callable(value) or getattr(value, "ndim", 0):
                raise ValueError(
                    f"{name} is {shown(value)}; a config takes a name. Pass a function or an array "
                    f"to the model, as in jf.Decoder(config, {name}=…)"
                )
        super().__post_init__()
        check_at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim", "num_heads")
        check_at_least(1, self, "num_kv_heads", "head_dim", "mlp_dim", "relative_distance")
        check_at_least(1, self, "experts_per_token", "expert_dim", "shared_expert_dim")
        check_at_least(0, self, "position_offset", "num_experts")
        check_at_least(4, self, "relative_buckets")
        check_not_empty(self, "rotary_base", "rotary_scaling", "num_experts")
        check_fraction(self, "dropout")
        check_positive(self, "rotary_fraction")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim is {self.embed_dim}, which num_heads ({self.num_heads}) does not "
                "divide; choose a multiple of num_heads, or set head_dim"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads ({self.num_heads})"
            )
        if any(0 < num < self.experts_per_token for num in entries(self.num_experts)):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; it must be at most num_experts "
                f"({self.num_experts})"
            )
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        if self.parallel_block != "none" and (self.norm_position != "pre" or not self.residual):
            raise ValueError(
                f"parallel_block is {self.parallel_block!r}; it needs norm_position 'pre' and "
                "residual True"
            )
        if self.positions == "rotary":
            turning = int(head_dim * self.rotary_fraction)
            if turning % 2 or not 0 < turning <= head_dim:
                raise ValueError(
                    f"head_dim is {head_dim}, and rotary_fraction ({self.rotary_fraction}) rotates "
                    f"{turning} features; the number of rotated features must be even and in "
                    f"2 … {head_dim}"
                )
        if self.positions.startswith("sinusoidal") and self.embed_dim % 2:
            raise ValueError(
                f"embed_dim is {self.embed_dim}; it must be even for sinusoidal positions"
            )
        if self.relative_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_distance is {self.relative_distance}; it must be greater than half of "
                f"relative_buckets ({self.relative_buckets})"
            )
        check_positive(self, "norm_epsilon", "rotary_base", "attention_scale", "attention_softcap")
        check_positive(self, "output_scale", "logits_softcap")

    @property
    def sizes(self) -> Sizes:
        """The sizes, with defaults in place of None."""

        def has_bias(own: bool | None) -> bool:
            return self.use_bias if own is None else own

        return Sizes(
            self.num_kv_heads or self.num_heads,
            self.head_dim or self.embed_dim // self.num_heads,
            self.mlp_dim or 4 * self.embed_dim,
            self.expert_dim or self.mlp_dim or 4 * self.embed_dim,
            has_bias(self.query_key_value_bias),
            has_bias(self.attention_output_bias),
            has_bias(self.feedforward_bias),
            has_bias(self.norm_bias),
        )

    @property
    def open_fields(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return self.sizes._asdict()

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.num_experts for layer in self.layers)

    @property
    def heads(self) -> tuple[int, ...]:
        """See `ModelConfig`."""
        return self.num_heads, self.sizes.num_kv_heads

    @property
    def layers(self) -> tuple:
        """The config of each layer, with the layer's own entry in place of each per-layer tuple."""
        return _layers(self)


@cache
def _layers(config: TransformerConfig) -> tuple:
    settings = {name: getattr(config, name) for name in config.patterns}
    patterns = {name: value for name, value in settings.items() if isinstance(value, tuple)}
    if not patterns and config.first_attention_norm:
        return (config,) * config.num_layers
    layers = []
    for layer in range(config.num_layers):
        values = {name: pattern[layer % len(pattern)] for name, pattern in patterns.items()}
        if values.get("rotary_base", 0.0) is None:
            values |= {"positions": "none", "rotary_base": 10_000.0, "rotary_scaling": None}
        values["first_attention_norm"] = config.first_attention_norm or layer > 0
        layers.append(replace(config, **values))
    return tuple(layers)
