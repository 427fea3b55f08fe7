"""The encoder's config."""

from dataclasses import dataclass

from jaxformer.models.config.transformer import TransformerConfig


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """A bidirectional Transformer. A None is worked out from the other fields (`resolved`)."""
