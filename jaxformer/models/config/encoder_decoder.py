"""The configs of models that read a source."""

from dataclasses import dataclass, replace

from jaxformer.models.config.check import at_least
from jaxformer.models.config.encoder import EncoderConfig
from jaxformer.models.config.recurrent import RecurrentConfig
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class ReadsSource:
    """What the config of a model has besides when it reads a source."""

    source_vocab_size: int | None = None
    """number of ids in the source; None: vocab_size"""
    max_source_length: int | None = None
    """most tokens of a source; None: max_length"""
    share_embeddings: bool = True
    """source and target have one table of token vectors"""

    def __post_init__(self):
        super().__post_init__()
        at_least(1, self, "source_vocab_size", "max_source_length")
        if self.share_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"source_vocab_size is {self.source_vocab_size}; with share_embeddings it must be "
                f"vocab_size ({self.vocab_size})"
            )

    @property
    def resolved(self):
        config = super().resolved
        if None not in (config.source_vocab_size, config.max_source_length):
            return config
        return replace(
            config,
            source_vocab_size=config.source_vocab_size or config.vocab_size,
            max_source_length=config.max_source_length or config.max_length,
        )


@dataclass(frozen=True)
class EncoderDecoderConfig(ReadsSource, TransformerConfig):
    """An encoder–decoder Transformer; vocab_size, max_length and num_layers are the decoder's.

    A None is worked out from the other fields (`resolved`).
    """

    num_encoder_layers: int | None = None
    """blocks of the encoder; None: num_layers"""
    num_encoder_heads: int | None = None
    """heads of the encoder; None: num_heads, and num_kv_heads of keys and values"""
    encoder_mlp_dim: int | None = None
    """width inside the encoder's feed-forward layers; None: mlp_dim"""

    def __post_init__(self):
        super().__post_init__()
        at_least(1, self, "num_encoder_layers", "num_encoder_heads", "encoder_mlp_dim")

    @property
    def resolved(self):
        config = super().resolved
        own = {
            "num_encoder_layers": config.num_layers,
            "num_encoder_heads": config.num_heads,
            "encoder_mlp_dim": config.mlp_dim,
        }
        missing = {name: x for name, x in own.items() if getattr(config, name) is None}
        return replace(config, **missing) if missing else config

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder's part of a complete config."""
        fields = {name: getattr(self, name) for name in TransformerConfig.__dataclass_fields__}
        own = {
            "num_layers": self.num_encoder_layers,
            "num_heads": self.num_encoder_heads,
            "mlp_dim": self.encoder_mlp_dim,
            "vocab_size": self.source_vocab_size,
            "max_length": self.max_source_length,
            "output_scale": None,  # it is for the head
        }
        if self.num_encoder_heads != self.num_heads:
            own |= {"num_kv_heads": None, "head_dim": None}
        return EncoderConfig(**fields | own).resolved


@dataclass(frozen=True)
class RecurrentEncoderDecoderConfig(ReadsSource, RecurrentConfig):
    """An RNN or LSTM that reads a source, and another that goes on from its last state.

    A None is worked out from the other fields (`resolved`).
    """

    attends: bool = True
    """the decoder looks at every state of the encoder; False: its last one carries all"""
