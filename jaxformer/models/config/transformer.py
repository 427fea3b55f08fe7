"""What every Transformer's config has."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.models.config.check import at_least, fraction, one_of, positive

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["layer", "rms", "rms_one_plus", "none"]
Positions = Literal["learned", "sinusoidal", "rotary", "none"]


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
    attention_scale: float | None = None
    """factor of the attention scores; None: 1 / √head_dim"""
    use_bias: bool = True
    """biases in the blocks' linear maps and layer norms"""
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
        if self.positions == "rotary" and head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary positions need it even")
        if self.positions == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim is {self.embed_dim}; sinusoidal positions need it even")
        positive(self, "norm_epsilon", "rotary_base")

    @property
    def resolved(self):
        """The same config with every None that stands for a size worked out."""
        if None not in (self.num_kv_heads, self.head_dim, self.mlp_dim):
            return self
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.head_dim or self.embed_dim // self.num_heads,
            mlp_dim=self.mlp_dim or 4 * self.embed_dim,
        )
