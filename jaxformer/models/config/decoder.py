"""The decoder-only Transformer's config."""

from dataclasses import dataclass

from jaxformer.models.config.check import at_least, pattern
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """A decoder-only Transformer. A None is worked out from the other fields (`resolved`)."""

    patterns = (*TransformerConfig.patterns, "window")
    window: int | tuple[int | None, ...] | None = None
    """a token sees itself and the window − 1 before it; None: all before it"""
    prefix: int = 0
    """number of first tokens that see one another in both directions (prefix-LM)"""

    def __post_init__(self):
        super().__post_init__()
        pattern(self, "window")
        at_least(1, self, "window")
        at_least(0, self, "prefix")
        if self.prefix > self.max_length:
            raise ValueError(f"prefix is {self.prefix}; it must be in 0 … {self.max_length}")
