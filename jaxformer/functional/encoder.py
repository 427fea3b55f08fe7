"""The encoder as pure functions of its weights: everyone sees everyone, padding aside.

    tokens → embedding + position → blocks → norm                     (seeds: lecture 13 §2–3)

It is not autoregressive: output i depends on the tokens behind it too. So it learns to fill in what
was masked out of a text, from both sides (Devlin et al. 2019, BERT): see `masking.mask_tokens`.
"""

import jax.numpy as jnp

from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.feedforward import activate
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.masks import Mask, Packed
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.transformer import POINTS, read_rows, stack_initializers

__all__ = ["POINTS", "encode", "head", "hidden_states", "initializers", "inspect", "logits"]
__all__ += ["pooled"]


def initializers(config) -> dict:
    """The encoder's weights by name, each as a pure initialiser of one key."""
    dim = config.embed_dim
    parts = stack_initializers(config) | {
        "pooler": lambda key: init_linear(key, dim, dim),
        "transform": lambda key: init_linear(key, dim, dim),
        "transform_norm": lambda key: init_norm(config.norm, dim),
    }
    return with_head(parts, config, dim)


def encode(weights, tokens, config, execution, *, mask: Mask | None = None, **options):
    """(a vector for each token [batch, length, dim], what `capture` names): see `read_rows`."""
    rule = Packed() if mask is None else mask & Packed()
    return read_rows(weights, tokens, config, execution, rule, **options)


def hidden_states(weights, tokens, config, execution, **options):
    """What the head is applied to: Norm(act(W h + b)) of each token's vector (BERT's transform)."""
    return inspect(weights, tokens, config, execution, **options)[0]


def inspect(weights, tokens, config, execution, **options):
    """(what `hidden_states` gives, what passed through the points named in `capture`)."""
    encoded, captured = encode(weights, tokens, config, execution, **options)
    hidden = activate(linear(weights["transform"], encoded), config.activation)
    normalize = normalizer(config.norm, config.norm_epsilon)
    return normalize(weights["transform_norm"], hidden), captured


def pooled(weights, encoded, segments=None):
    """One vector for each row: tanh(W h + b), h that of the first token that is not padding."""
    first = jnp.zeros(len(encoded), int) if segments is None else (segments != 0).argmax(axis=1)
    rows = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
    return jnp.tanh(linear(weights["pooler"], rows))
