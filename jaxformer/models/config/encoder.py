"""The encoder's config."""

from dataclasses import dataclass

from jaxformer.models.config.check import at_least, pattern
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """A bidirectional Transformer. A None is worked out from the other fields (`resolved`)."""

    patterns = (*TransformerConfig.patterns, "window")
    bidirectional = True
    window: int | tuple[int | None, ...] | None = None
    """a token sees those at most so far away, on either side; None: all"""
    num_token_types: int = 0
    """kinds of tokens (question and answer, …), each with a vector that is added to a token's"""
    transform: bool = True
    """one more affine map, activation and norm before the head (BERT)"""
    pooler: bool = True
    """an affine map and tanh, which make a vector for a row of that of its first token"""
    num_labels: int = 0
    """classes that `classify` tells apart by that vector"""

    def __post_init__(self):
        super().__post_init__()
        pattern(self, "window")
        at_least(1, self, "window")
        at_least(0, self, "num_token_types", "num_labels")
        if self.num_labels and not self.pooler:
            raise ValueError(f"num_labels is {self.num_labels}; it needs the pooler")
