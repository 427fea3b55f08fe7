"""Builds the parts that models of several kinds have: norms and heads."""

from jaxformer.functional.layers.norms import NORMS, Norm
from jaxformer.functional.outputs import Head
from jaxformer.models.config import ConvolutionalConfig, RecurrentConfig
from jaxformer.models.config.transformer import TransformerConfig


def norm_of(config: TransformerConfig | ConvolutionalConfig) -> Norm | None:
    """Returns the norm that a config describes; None if it has none."""
    return NORMS[config.norm](config.norm_epsilon, bool(config.norm_bias))


def head_of(config: TransformerConfig | ConvolutionalConfig | RecurrentConfig, dim: int) -> Head:
    """Returns the head that a config describes; it reads `dim` features."""
    tied, cap = config.tie_embeddings, config.logits_cap
    return Head(config.vocab_size, dim, tied, config.head_bias, cap)
