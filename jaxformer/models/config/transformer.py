"""What every Transformer's config has."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.models.config.check import at_least, fraction, one_of, positive

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["layer", "rms", "rms_one_plus", "none"]
Positions = Literal["learned", "sinusoidal", "rotary", "none"]

_BIASES = ("query_key_value_bias", "attention_output_bias", "feedforward_bias", "norm_bias")


@dataclass(frozen=True)
class TransformerConfig:
    """The stack of blocks. A None is worked out from the other fields (`resolved`)."""

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
    positions: Positions = "learned"
    """how positions are encoded"""
    rotary_base: float = 10_000.0
    """pair i of a head's features turns by rotary_base^(−2i / head_dim) per position"""
    rotary_fraction: float = 1.0
    """of a head's features, from the first on, that turn"""
    rotary_interleaved: bool = False
    """a pair is two neighbours (RoFormer), not one feature of each half (Llama)"""
    query_key_norm: Literal["none", "head", "all"] = "none"
    """a norm on queries and keys, before they turn: of each head by itself, or of all together"""
    attention_scale: float | None = None
    """factor of the attention scores; None: 1 / √head_dim"""
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
        at_least(1, self, "num_kv_heads", "head_dim", "mlp_dim")
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
            turning = int(head_dim * self.rotary_fraction)
            if turning % 2 or not 0 < turning <= head_dim:
                raise ValueError(
                    f"head_dim is {head_dim}, of which rotary_fraction ({self.rotary_fraction}) "
                    f"turns {turning} features; it must be an even number in 2 … {head_dim}"
                )
        if self.positions == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim is {self.embed_dim}; sinusoidal positions need it even")
        positive(self, "norm_epsilon", "rotary_base")

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
