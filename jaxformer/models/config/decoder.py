"""Config of the decoder-only Transformer."""

from dataclasses import dataclass

from jaxformer.models.config.check import check_at_least, check_not_empty
from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class DecoderConfig(TransformerConfig):
    """Config of a decoder-only Transformer.

    `resolved` replaces a size that is None by its value, computed from the other fields.
    """

    patterns = (*TransformerConfig.patterns, "window")
    window: int | tuple[int | None, ...] | None = None
    """a token attends to itself and to the window − 1 tokens before it; None: to all before it"""
    prefix: int = 0
    """number of first tokens of a document that attend to one another in both directions
    (prefix-LM)"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_not_empty(self, "window")
        check_at_least(1, self, "window")
        check_at_least(0, self, "prefix")
        if self.prefix > self.max_length:
            raise ValueError(f"prefix is {self.prefix}; it must be in 0 … {self.max_length}")
