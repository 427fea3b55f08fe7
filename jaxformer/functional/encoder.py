"""The encoder as pure functions of its weights: everyone sees everyone, padding aside.

    tokens → embedding + position → blocks → norm                     (seeds: lecture 13 §2–3)

It is not autoregressive: output i depends on the tokens behind it too. So it learns to fill in what
was masked out of a text, from both sides (Devlin et al. 2019, BERT): see `masking.mask_tokens`.
"""

import jax.numpy as jnp

from jaxformer.functional import transformer
from jaxformer.functional.blocks import BLOCK_POINTS
from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.feedforward import activate
from jaxformer.functional.layers import Forward
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.masks import Mask, Packed
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.transformer import POINTS, stack_initializers

__all__ = [
    "POINTS",
    "encode",
    "forward",
    "head",
    "initializers",
    "layer_points",
    "logits",
    "points",
    "pooled",
]
__all__ += ["self_attention_mask"]


def initializers(config) -> dict:
    """The encoder's weights by name, each as a pure initialiser of one key."""
    dim = config.embed_dim
    parts = stack_initializers(config) | {
        "pooler": lambda key: init_linear(key, dim, dim),
        "transform": lambda key: init_linear(key, dim, dim),
        "transform_norm": lambda key: init_norm(config.norm, dim),
    }
    return with_head(parts, config, dim)


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    return POINTS


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return BLOCK_POINTS


def self_attention_mask(config, mask: Mask | None = None) -> Mask:
    """Everyone within a document; or the caller's mask, within a document too."""
    return Packed() if mask is None else mask & Packed()


encode = transformer.forward  # `hidden` is a vector for each token, in its context


def forward(weights, tokens, config, execution, mask: Mask, **inputs) -> Forward:
    """A pass of which `hidden` is what the head is applied to: Norm(act(W h + b)) of each token's
    vector (BERT's transform)."""
    encoded = encode(weights, tokens, config, execution, mask, **inputs)
    hidden = activate(linear(weights["transform"], encoded.hidden), config.activation)
    normalize = normalizer(config.norm, config.norm_epsilon)
    return encoded._replace(hidden=normalize(weights["transform_norm"], hidden))


def pooled(weights, encoded, segments=None):
    """One vector for each row: tanh(W h + b), h that of the first token that is not padding."""
    first = jnp.zeros(len(encoded), int) if segments is None else (segments != 0).argmax(axis=1)
    rows = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
    return jnp.tanh(linear(weights["pooler"], rows))
