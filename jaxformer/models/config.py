"""What a model's mathematics is (`DecoderConfig`) and how it is run (`Execution`).

Both are frozen, hashable and free of JAX, so that a command line can show them at once. A config
holds no mode, mesh or key.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
Norm = Literal["layer", "rms", "none"]
Positions = Literal["learned", "sinusoidal", "rotary", "none"]


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only Transformer. A None is worked out from the other fields (`complete`)."""

    vocab_size: int = 50_257
    """number of token ids"""
    max_length: int = 1024
    """most positions of one document, prompt and generated tokens together"""
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
    """of the feed-forward layer; swiglu and geglu are gated"""
    output_activation: bool = False
    """the non-linearity after the second map of the feed-forward layer too (lecture 10)"""
    norm: Norm = "layer"
    """normalisation over the features"""
    norm_position: Literal["pre", "post"] = "pre"
    """before each sub-layer (and after the stack), or after each residual sum"""
    norm_epsilon: float = 1e-5
    """inside the root"""
    residual: bool = True
    """add a sub-layer's input to its output"""
    positions: Positions = "learned"
    """how the model is told where a token stands"""
    rotary_base: float = 10_000.0
    """slowest wavelength / 2π of rotary positions"""
    attention_scale: float | None = None
    """what scores are multiplied by; None: 1 / √head_dim"""
    window: int | None = None
    """a token sees itself and the window − 1 before it; None: all before it"""
    prefix: int = 0
    """so many first tokens see one another both ways (prefix-LM)"""
    use_bias: bool = True
    """biases in the blocks' linear maps and layer norms"""
    head_bias: bool = False
    """a bias on the logits"""
    tie_embeddings: bool = True
    """the output map is the token embedding, transposed"""
    scale_embeddings: bool = False
    """token embeddings times √embed_dim"""
    dropout: float = 0.0
    """on the embeddings and on what each sub-layer adds, while training"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of activations; parameters, statistics, logits and losses are float32"""

    def __post_init__(self):
        for name in ("vocab_size", "max_length", "num_layers", "embed_dim", "num_heads"):
            _at_least_one(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "mlp_dim", "window"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {accepted}")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim is {self.embed_dim}, which num_heads ({self.num_heads}) does not "
                "divide; choose one that it does, or give head_dim"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads ({self.num_heads})"
            )
        if self.positions == "rotary" and self.complete.head_dim % 2:
            raise ValueError(f"head_dim is {self.complete.head_dim}; rotary positions need it even")
        if self.positions == "sinusoidal" and self.embed_dim % 2:
            raise ValueError(f"embed_dim is {self.embed_dim}; sinusoidal positions need it even")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if not self.norm_epsilon > 0.0:
            raise ValueError(f"norm_epsilon is {self.norm_epsilon}; it must be above 0")
        if not 0 <= self.prefix <= self.max_length:
            raise ValueError(f"prefix is {self.prefix}; it must be in 0 … {self.max_length}")

    @property
    def complete(self) -> "DecoderConfig":
        """The same config with every None that stands for a size worked out."""
        if None not in (self.num_kv_heads, self.head_dim, self.mlp_dim):
            return self
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.head_dim or self.embed_dim // self.num_heads,
            mlp_dim=self.mlp_dim or 4 * self.embed_dim,
        )


@dataclass(frozen=True)
class Execution:
    """How a model is run: this changes neither its parameters nor, but for rounding, its values."""

    attention: Literal["auto", "explicit", "blockwise", "fused"] = "auto"
    """auto: cuDNN's fused kernel on a GPU where it can, else query block by query block"""
    layers: Literal["scan", "unrolled"] = "scan"
    """scan compiles one block; unrolled compiles each (often faster on a GPU)"""
    remat: Literal["none", "dots", "full"] = "none"
    """what going back recomputes: nothing; all but matrix products; whole blocks"""

    def __post_init__(self):
        for name, accepted in _EXECUTION_CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {accepted}")


def _choices(config_class):
    """The accepted strings of every Literal field, read off the annotations."""
    return {
        field.name: field.type.__args__
        for field in fields(config_class)
        if getattr(field.type, "__origin__", None) is Literal
    }


_CHOICES = _choices(DecoderConfig)
_EXECUTION_CHOICES = _choices(Execution)


def _at_least_one(name, value):
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _gpt2(num_layers, embed_dim, num_heads):
    return DecoderConfig(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads)


PRESETS = {
    # Radford et al. 2019, table 2; the sizes of the published checkpoints.
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-350m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # TinyLlama (Zhang et al. 2024): Llama 2's architecture with grouped heads.
    "llama-1.1b": DecoderConfig(
        vocab_size=32_000,
        max_length=2048,
        num_layers=22,
        embed_dim=2048,
        num_heads=32,
        num_kv_heads=4,
        mlp_dim=5632,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        use_bias=False,
        tie_embeddings=False,
    ),
}


def preset(name: str) -> DecoderConfig:
    """The published configuration of that name; `dataclasses.replace` changes it."""
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the model, by formula (no arrays are made)."""
    c = config.complete
    bias, gated = int(c.use_bias), c.activation in ("swiglu", "geglu")
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = (c.embed_dim + bias) * (heads + 2 * kv_heads) + (heads + bias) * c.embed_dim
    feed = (1 + gated) * (c.embed_dim + bias) * c.mlp_dim + (c.mlp_dim + bias) * c.embed_dim
    norm = {"layer": 1 + bias, "rms": 1, "none": 0}[c.norm] * c.embed_dim
    embedding = (c.vocab_size + (c.positions == "learned") * c.max_length) * c.embed_dim
    head = c.vocab_size * ((not c.tie_embeddings) * c.embed_dim + c.head_bias)
    final = norm if c.norm_position == "pre" else 0
    return c.num_layers * (attention + feed + 2 * norm) + embedding + final + head
