"""The configs of models that read a source."""

from dataclasses import dataclass, replace

from jaxformer.models.config.check import at_least
from jaxformer.models.config.encoder import EncoderConfig
from jaxformer.models.config.recurrent import RecurrentConfig
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
    """An encoder–decoder Transformer; vocab_size, max_length and num_layers are the decoder's.

    A None is worked out from the other fields (`complete`).
    """

    num_encoder_layers: int | None = None
    """blocks of the encoder; None: num_layers"""
    source_vocab_size: int | None = None
    """number of ids in the source; None: vocab_size"""
    max_source_length: int | None = None
    """most tokens of a source; None: max_length"""
    share_embeddings: bool = True
    """source and target have one table of token vectors"""

    def __post_init__(self):
        super().__post_init__()
        check_source_fields(self)

    @property
    def complete(self):
        return with_source_sizes(
            super().complete, num_encoder_layers=self.num_encoder_layers or self.num_layers
        )

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder's part of a complete config."""
        fields = {name: getattr(self, name) for name in EncoderConfig.__dataclass_fields__}
        return EncoderConfig(
            **fields
            | {
                "num_layers": self.num_encoder_layers,
                "vocab_size": self.source_vocab_size,
                "max_length": self.max_source_length,
            }
        )


@dataclass(frozen=True)
class RecurrentEncoderDecoderConfig(RecurrentConfig):
    """An RNN or LSTM that reads a source, and another that goes on from its last state.

    A None is worked out from the other fields (`complete`).
    """

    attends: bool = True
    """the decoder looks at every state of the encoder; False: its last one carries all"""
    source_vocab_size: int | None = None
    """number of ids in the source; None: vocab_size"""
    max_source_length: int | None = None
    """most tokens of a source; None: max_length"""
    share_embeddings: bool = True
    """source and target have one table of token vectors"""

    def __post_init__(self):
        super().__post_init__()
        check_source_fields(self)

    @property
    def complete(self):
        return with_source_sizes(super().complete)


def check_source_fields(config) -> None:
    """What both refuse."""
    names = {"num_encoder_layers", "source_vocab_size", "max_source_length"}
    at_least(1, config, *sorted(names & config.__dataclass_fields__.keys()))
    if config.share_embeddings and config.source_vocab_size not in (None, config.vocab_size):
        raise ValueError(
            f"source_vocab_size is {config.source_vocab_size}; with share_embeddings it must be "
            f"vocab_size ({config.vocab_size})"
        )


def with_source_sizes(config, **sizes):
    """The config with the source's sizes worked out."""
    return replace(
        config,
        source_vocab_size=config.source_vocab_size or config.vocab_size,
        max_source_length=config.max_source_length or config.max_length,
        **sizes,
    )
