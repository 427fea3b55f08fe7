"""Configs of models that read a source sequence and generate a target sequence."""

from dataclasses import dataclass, replace
from typing import Any, Self

from jaxformer.models.config.check import check_at_least
from jaxformer.models.config.encoder import EncoderConfig
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.recurrent import RecurrentConfig
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class ReadsSource(ModelConfig):
    """Additional fields in the config of a model that reads a source."""

    reads_source = True

    source_vocab_size: int | None = None
    """number of source token ids; None: vocab_size"""
    max_source_length: int | None = None
    """maximum number of tokens of a source; None: max_length"""
    share_embeddings: bool = True
    """use one embedding table for source and target"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "source_vocab_size", "max_source_length")
        if self.share_embeddings and self.source_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"source_vocab_size is {self.source_vocab_size}; with share_embeddings it must be "
                f"vocab_size ({self.vocab_size})"
            )

    @property
    def longest_source(self) -> int:
        """See `ModelConfig`."""
        return self.max_source_length or self.max_length

    @property
    def num_source_ids(self) -> int:
        """See `ModelConfig`."""
        return self.source_vocab_size or self.vocab_size

    @property
    def resolved(self) -> Self:
        """The same config with every size that is None replaced by its value."""
        config = super().resolved
        if None not in (config.source_vocab_size, config.max_source_length):
            return config
        return replace(
            config,
            source_vocab_size=config.num_source_ids,
            max_source_length=config.longest_source,
        )


@dataclass(frozen=True)
class EncoderDecoderConfig(ReadsSource, TransformerConfig):
    """Config of an encoder–decoder Transformer.

    `vocab_size`, `max_length` and `num_layers` describe the decoder. `resolved` replaces a size
    that is None by its value, computed from the other fields.
    """

    num_encoder_layers: int | None = None
    """number of Transformer blocks in the encoder; None: num_layers"""
    num_encoder_heads: int | None = None
    """number of attention heads in the encoder; None: num_heads query heads and num_kv_heads key
    and value heads"""
    encoder_mlp_dim: int | None = None
    """width inside the encoder's feed-forward layers; None: mlp_dim"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "num_encoder_layers", "num_encoder_heads", "encoder_mlp_dim")
        heads = self.num_encoder_heads
        if heads is not None and heads != self.num_heads:
            unit = 2 * heads if self.positions == "rotary" else heads
            if self.embed_dim % unit:
                twice = "twice " * (unit > heads)
                raise ValueError(
                    f"num_encoder_heads is {heads}; {twice}num_encoder_heads must divide "
                    f"embed_dim ({self.embed_dim})"
                )

    @property
    def resolved(self) -> Self:
        """The same config with every size that is None replaced by its value."""
        config = super().resolved
        own = {
            "num_encoder_layers": config.num_layers,
            "num_encoder_heads": config.num_heads,
            "encoder_mlp_dim": config.mlp_dim,
        }
        missing = {name: x for name, x in own.items() if getattr(config, name) is None}
        return replace(config, **missing) if missing else config

    @property
    def stacks(self) -> dict[str, ModelConfig]:
        """See `ModelConfig`."""
        return {"": self, "encoder/": self.encoder}

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder's config; call it on a resolved config."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in TransformerConfig.__dataclass_fields__
        }
        own: dict[str, Any] = {
            "num_layers": self.num_encoder_layers,
            "num_heads": self.num_encoder_heads,
            "mlp_dim": self.encoder_mlp_dim,
            "vocab_size": self.source_vocab_size,
            "max_length": self.max_source_length,
            "output_scale": None,  # applies before the head, which only the decoder has
        }
        if self.num_encoder_heads != self.num_heads:
            own |= {"num_kv_heads": None, "head_dim": None}
        return EncoderConfig(**fields | own).resolved


@dataclass(frozen=True)
class RecurrentEncoderDecoderConfig(ReadsSource, RecurrentConfig):
    """Config of a recurrent encoder–decoder.

    One RNN or LSTM reads the source. Another one starts from its last state and generates the
    target. `resolved` replaces a size that is None by its value, computed from the other fields.
    """

    attends: bool = True
    """the decoder attends to all encoder states; False: it only starts from the last one"""

    @property
    def stacks(self) -> dict[str, ModelConfig]:
        """See `ModelConfig`."""
        return {"": self, "encoder/": replace(self, vocab_size=self.num_source_ids)}
