"""What every Transformer's config has."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from jaxformer.models.config.check import at_least, entries, fraction, one_of, pattern, positive
from jaxformer.models.config.rotary import RotaryScaling, Scaling

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["layer", "rms", "rms_one_plus", "none"]
Positions = Literal[
    "learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative", "alibi", "none"
]

_BIASES = ("query_key_value_bias", "attention_output_bias", "feedforward_bias", "norm_bias")


@dataclass(frozen=True)
class TransformerConfig:
    """The stack of blocks. A None is worked out from the other fields (`resolved`).

    A tuple is a pattern: the entries of successive layers, repeated over the depth (`layers`).
    """

    patterns = ("rotary_base", "rotary_scaling")
    bidirectional = False

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """maximum tokens of one document, prompt and generated tokens together"""
    num_layers: int = 12
    """blocks"""
    embed_dim: int = 768
    """width of the residual stream"""
    num_heads: int = 12
    """query heads"""
    num_kv_heads: int | None = None
    """key and value heads, each shared by num_heads / num_kv_heads query heads; None: num_heads"""
    head_dim: int | None = None
    """width of one head; None: embed_dim / num_heads"""
    mlp_dim: int | None = None
    """width inside the feed-forward layer; None: 4 embed_dim"""
    activation: Activation = "gelu_tanh"
    """activation of the feed-forward layer; swiglu and the two geglu are gated"""
    output_activation: bool = False
    """apply the activation after the feed-forward layer's second map too (lecture 10)"""
    norm: Norm = "layer"
    """normalisation over the features; rms_one_plus: the scale is stored as γ − 1 (Gemma)"""
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    """before each sub-layer; after each residual sum; of each sub-layer's output, before that sum
    (OLMo 2); or before and of the output (Gemma 2). All but post: after the stack too"""
    parallel: Literal["no", "two_norms", "one_norm"] = "no"
    """attention and feed-forward layer read the same input and are added together: each through a
    norm of its own (GPT-NeoX), or through one (GPT-J)"""
    norm_epsilon: float = 1e-5
    """added to the variance inside the square root"""
    embedding_norm: bool = False
    """normalise the embeddings too, after positions are added"""
    residual: bool = True
    """add a sub-layer's input to its output"""
    first_attention_norm: bool = True
    """a norm before the attention of the first layer too (False: ModernBERT)"""
    positions: Positions = "learned"
    """how positions are encoded: as vectors added to the embeddings (of sinusoids: sine and cosine
    in turn, or halves), by turning query and key, by a learned bias of the scores for each distance
    (T5), or by one that falls with it (ALiBi)"""
    position_offset: int = 0
    """rows of the learned table before that of position 0 (2 in RoBERTa and BART)"""
    relative_buckets: int = 32
    """distances that the relative bias tells apart"""
    relative_distance: int = 128
    """distance from which on they are all one"""
    rotary_base: float | tuple[float | None, ...] = 10_000.0
    """pair i of a head's features turns by rotary_base^(−2i / head_dim) per position; None in a
    pattern: this layer has no positions (SmolLM 3)"""
    rotary_scaling: Scaling | tuple[Scaling | None, ...] | None = None
    """a RotaryScaling: how those turns are slowed down for longer texts"""
    rotary_fraction: float = 1.0
    """of a head's features, from the first on, that turn"""
    rotary_interleaved: bool = False
    """a pair is two neighbours (RoFormer), not one feature of each half (Llama)"""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """a norm on queries and keys, before they turn: of each head by itself, or of all together"""
    attention_scale: float | None = None
    """factor of the attention scores; None: 1 / √head_dim"""
    attention_cap: float | None = None
    """scores s become cap · tanh(s / cap) (Gemma 2)"""
    output_scale: float | None = None
    """factor of the last hidden states, before the head (T5: 1 / √embed_dim)"""
    logits_cap: float | None = None
    """logits y become cap · tanh(y / cap)"""
    use_bias: bool = True
    """biases of the blocks' linear maps and layer norms, where the next four leave it open"""
    query_key_value_bias: bool | None = None
    """biases of the maps to query, key and value; None: use_bias"""
    attention_output_bias: bool | None = None
    """a bias of the map from the heads; None: use_bias"""
    feedforward_bias: bool | None = None
    """biases of the feed-forward layer; None: use_bias"""
    norm_bias: bool | None = None
    """biases of layer norms; None: use_bias"""
    head_bias: bool = False
    """a bias on the logits"""
    tie_embeddings: bool = True
    """the output map is the token embedding, transposed"""
    scale_embeddings: bool = False
    """token embeddings times √embed_dim"""
    dropout: float = 0.0
    """dropout rate, on the embeddings and on each sub-layer's output, in training only"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of activations; parameters, statistics, logits and losses are float32"""

    def __post_init__(self):
        at_least(1, self, "vocab_size", "max_length", "num_layers", "embed_dim", "num_heads")
        at_least(1, self, "num_kv_heads", "head_dim", "mlp_dim", "relative_distance")
        at_least(0, self, "position_offset")
        at_least(4, self, "relative_buckets")
        pattern(self, "rotary_base")
        pattern(self, "rotary_scaling", kind=RotaryScaling)
        one_of(self)
        fraction(self, "dropout")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim is {self.embed_dim}, which num_heads ({self.num_heads}) does not "
                "divide; choose one that it does, or give head_dim"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads ({self.num_heads})"
            )
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        if self.parallel != "no" and (self.norm_position != "pre" or not self.residual):
            raise ValueError(
                f"parallel is {self.parallel!r}; it needs norm_position 'pre' and residual"
            )
        if self.positions == "rotary":
            positive(self, "rotary_fraction")
            self._check_scaling()
            turning = int(head_dim * self.rotary_fraction)
            if turning % 2 or not 0 < turning <= head_dim:
                raise ValueError(
                    f"head_dim is {head_dim}, of which rotary_fraction ({self.rotary_fraction}) "
                    f"turns {turning} features; it must be an even number in 2 … {head_dim}"
                )
        if self.positions.startswith("sinusoidal") and self.embed_dim % 2:
            raise ValueError(f"embed_dim is {self.embed_dim}; sinusoidal positions need it even")
        if self.relative_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_distance is {self.relative_distance}; it must be above half of "
                f"relative_buckets ({self.relative_buckets})"
            )
        positive(self, "norm_epsilon", "rotary_base", "attention_scale", "attention_cap")
        positive(self, "output_scale", "logits_cap")

    def _check_scaling(self):
        for scaling in entries(self.rotary_scaling):
            if not isinstance(scaling, RotaryScaling | None):
                raise ValueError(
                    f"rotary_scaling is a {type(scaling).__name__}; it must be a RotaryScaling"
                )

    @property
    def resolved(self):
        """The same config with every None that stands for a size worked out."""
        open_sizes = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.head_dim or self.embed_dim // self.num_heads,
            "mlp_dim": 4 * self.embed_dim,
            **dict.fromkeys(_BIASES, self.use_bias),
        }
        missing = {name: x for name, x in open_sizes.items() if getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    @property
    def layers(self) -> tuple:
        """The config of each layer: this one, with the layer's own entry of each pattern."""
        return _layers(self)


@cache
def _layers(config) -> tuple:
    given = {name: getattr(config, name) for name in config.patterns}
    patterns = {name: value for name, value in given.items() if isinstance(value, tuple)}
    if not patterns and config.first_attention_norm:
        return (config,) * config.num_layers
    layers = []
    for layer in range(config.num_layers):
        own = {name: entries[layer % len(entries)] for name, entries in patterns.items()}
        if own.get("rotary_base", 0.0) is None:
            own |= {"positions": "none", "rotary_base": 10_000.0, "rotary_scaling": None}
        own["first_attention_norm"] = config.first_attention_norm or layer > 0
        layers.append(replace(config, **own))
    return tuple(layers)
