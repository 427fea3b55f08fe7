"""Config of the encoder."""

from dataclasses import dataclass
from typing import ClassVar

from jaxformer.models.config.check import check_at_least, check_not_empty
from jaxformer.models.config.needs import AnyOf, Is, Needs
from jaxformer.models.config.transformer import TransformerConfig

_OWN_LINEAR = (Is("transform", True), Is("pooler", True))


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """Config of a bidirectional Transformer.

    `resolved` replaces a size that is None by its value, computed from the other fields.
    """

    patterns = (*TransformerConfig.patterns, "window")
    needs: ClassVar[Needs] = {
        **TransformerConfig.needs,
        "use_bias": (AnyOf(*TransformerConfig.needs["use_bias"], *_OWN_LINEAR),),
    }
    bidirectional = True
    window: int | tuple[int | None, ...] | None = None
    """a token attends to tokens at most this many positions away, on both sides; None: to all"""
    num_token_types: int = 0
    """number of token types (such as question and answer); the vector of a token's type is added to
    its embedding"""
    transform: bool = True
    """apply one more linear layer, activation and norm before the output head (BERT)"""
    pooler: bool = True
    """add a pooler: a linear layer and tanh of the first token's final hidden state, one vector for
    each sequence"""
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
                f"num_labels is {self.num_labels}; it needs the pooler (pooler is False)"
            )
