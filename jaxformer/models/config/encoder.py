"""Configs of encoders and encoder-decoders."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxformer.models.config.baselines import RecurrentConfig
from jaxformer.models.config.check import check_at_least, check_not_empty
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, any_of, is_one_of
from jaxformer.models.config.transformer import TransformerConfig

_OWN_LINEAR = (is_one_of("transform", True), is_one_of("pooler", True))


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """Config of a bidirectional encoder, such as BERT.

    `resolved` replaces each size that is None by a value computed from the other fields.
    """

    patterns = (*TransformerConfig.patterns, "window")
    needs: ClassVar[Needs] = {
        **TransformerConfig.needs,
        "use_bias": (any_of(*TransformerConfig.needs["use_bias"], *_OWN_LINEAR),),
    }
    bidirectional = True
    window: int | tuple[int | None, ...] | None = None
    """a token attends to tokens at most this many positions away, on both sides; default: to all"""
    num_token_types: int = 0
    """number of token types (such as question and answer); the vector of a token's type is added to
    its embedding"""
    transform: bool = True
    """apply one more linear layer, activation and norm before the output head (BERT)"""
    pooler: bool = True
    """add a pooler, which computes one vector for each sequence: it applies a linear layer and tanh
    to the final hidden state of the first token"""
    num_labels: int = 0
    """number of classes that `classify` predicts from the pooler's vector; 0: no classifier"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_not_empty(self, "window")
        check_at_least(1, self, "window")
        check_at_least(0, self, "num_token_types", "num_labels")
        if self.num_labels and not self.pooler:
            raise ValueError(
                f"num_labels is {self.num_labels}, but pooler is False; set pooler=True"
            )


@dataclass(frozen=True)
class ReadsSource(ModelConfig):
    """Additional config fields of models that read a source."""

    reads_source = True

    source_vocab_size: int | None = None
    """number of source token ids; default: vocab_size"""
    source_features: int | None = None
    """number of float features at each position of the source (audio frames, image patches); a
    linear layer projects them to embed_dim; default: the source consists of tokens"""
    max_source_length: int | None = None
    """maximum number of tokens, or of positions with features, of a source; default: max_length"""
    share_embeddings: bool = True
    """use one embedding table for source and target; a source of features has no table"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_at_least(1, self, "source_vocab_size", "source_features", "max_source_length")
        if self.source_features is not None and self.source_vocab_size is not None:
            raise ValueError(
                f"source_vocab_size is {self.source_vocab_size}, but source_features is "
                f"{self.source_features}; a source of features does not use token ids"
            )
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
        return 0 if self.source_features else self.source_vocab_size or self.vocab_size

    @property
    def shares_table(self) -> bool:
        """Whether the source and the target share one table of token vectors."""
        return self.share_embeddings and self.source_features is None

    @property
    def open_fields(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return super().open_fields | {
            "source_vocab_size": self.num_source_ids or None,
            "max_source_length": self.longest_source,
        }


def check_reads_text(config: ModelConfig) -> None:
    """Raises ValueError if the source of a model consists of float features instead of text."""
    if config.source_features is not None:
        raise ValueError(
            f"source_features is {config.source_features}; it must be None to read text. This "
            "model reads float features: pass them to jaxformer.generate or jaxformer.beam_search"
        )


@dataclass(frozen=True)
class EncoderDecoderConfig(ReadsSource, TransformerConfig):
    """Config of an encoder–decoder Transformer.

    `vocab_size`, `max_length` and `num_layers` describe the decoder. `resolved` replaces each size
    that is None by a value computed from the other fields.
    """

    num_encoder_layers: int | None = None
    """number of Transformer blocks in the encoder; default: num_layers"""
    num_encoder_heads: int | None = None
    """number of attention heads in the encoder; default: num_heads query heads and num_kv_heads key
    and value heads"""
    encoder_mlp_dim: int | None = None
    """width inside the encoder's feed-forward layers; default: mlp_dim"""

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
    def open_fields(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return super().open_fields | {
            "num_encoder_layers": self.num_layers,
            "num_encoder_heads": self.num_heads,
            "encoder_mlp_dim": self.sizes.mlp_dim,
        }

    @property
    def stacks(self) -> dict[str, ModelConfig]:
        """See `ModelConfig`."""
        return {"": self, "encoder/": self.encoder}

    @property
    def encoder(self) -> EncoderConfig:
        """Returns the config of the encoder; requires a config from `ModelConfig.resolved`."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in TransformerConfig.__dataclass_fields__
        }
        own: dict[str, Any] = {
            "num_layers": self.num_encoder_layers,
            "num_heads": self.num_encoder_heads,
            "mlp_dim": self.encoder_mlp_dim,
            "vocab_size": self.num_source_ids or self.vocab_size,
            "max_length": self.max_source_length,
            # The encoder does not have an output head.
            "output_scale": None,
        }
        if self.num_encoder_heads != self.num_heads:
            own |= {"num_kv_heads": None, "head_dim": None}
        return EncoderConfig(**fields | own).resolved


@dataclass(frozen=True)
class RecurrentEncoderDecoderConfig(ReadsSource, RecurrentConfig):
    """Config of a recurrent encoder–decoder.

    The encoder is an RNN or LSTM that reads the source. The decoder is an RNN or LSTM that starts
    from the last state of the encoder and generates the target. `resolved` replaces each size that
    is None by a value computed from the other fields.
    """

    attends: bool = True
    """the decoder attends to all encoder states; False: it only starts from the last state"""

    @property
    def stacks(self) -> dict[str, ModelConfig]:
        """See `ModelConfig`."""
        return {
            "": self,
            "encoder/": replace(self, vocab_size=self.num_source_ids or self.vocab_size),
        }
