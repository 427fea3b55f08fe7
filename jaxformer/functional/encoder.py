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
from jaxformer.functional.masks import Mask, Near, Packed
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
    dim, parts = config.embed_dim, stack_initializers(config)

    def affine(key):
        return init_linear(key, dim, dim, use_bias=config.use_bias)

    if config.pooler:
        parts["pooler"] = affine
    if config.num_labels:
        parts["classifier"] = lambda key: init_linear(key, dim, config.num_labels)
    if config.transform:
        parts["transform"] = affine
        parts["transform_norm"] = lambda key: init_norm(config.norm, dim, use_bias=config.norm_bias)
    return with_head(parts, config, dim)


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    return POINTS


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return BLOCK_POINTS


def self_attention_mask(config, mask: Mask | None = None) -> Mask:
    """Everyone within a document, or those near by if the config has a window; or the caller's
    mask, within a document too."""
    if mask is None and config.window is not None:
        mask = Near(config.window)
    return Packed() if mask is None else mask & Packed()


encode = transformer.forward  # `hidden` is a vector for each token, in its context


def forward(weights, tokens, config, execution, masks, **inputs) -> Forward:
    """A pass of which `hidden` is what the head is applied to: Norm(act(W h + b)) of each token's
    vector (BERT's transform), or that vector itself."""
    encoded = encode(weights, tokens, config, execution, masks, **inputs)
    if not config.transform:
        return encoded
    hidden = activate(linear(weights["transform"], encoded.hidden), config.activation)
    normalize = normalizer(config.norm, config.norm_epsilon)
    return encoded._replace(hidden=normalize(weights["transform_norm"], hidden))


def pooled(weights, encoded, segments=None):
    """One vector for each row: tanh(W h + b), h that of the first token that is not padding."""
    first = jnp.zeros(len(encoded), int) if segments is None else (segments != 0).argmax(axis=1)
    rows = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
    return jnp.tanh(linear(weights["pooler"], rows))


def classified(weights, encoded, segments=None):
    """float32 logits of each row's classes, W tanh(…) + b of the pooled vector."""
    return linear(weights["classifier"], pooled(weights, encoded, segments), jnp.float32)
