"""The encoder as pure functions of its weights: tokens see all tokens of their document.

    tokens → embedding + position → blocks → norm

It is not autoregressive: output i also depends on later tokens. It therefore learns to fill in
tokens that are masked in a text, from both sides (Devlin et al. 2019, BERT); see
`token_masking.mask_tokens`.

Reference:
    Notes, lecture 13 §2–3.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional import transformer
from jaxformer.functional.blocks import BLOCK_POINTS
from jaxformer.functional.embedding import with_head
from jaxformer.functional.family import Family, Weights
from jaxformer.functional.initial import stack_initializers
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.feedforward import activate
from jaxformer.functional.layers.norms import init_norm, normalize
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.transformer import POINTS


def initializers(config: Any) -> dict:
    """Returns {name: initializer of the encoder's weights}, each a pure function of a key."""
    dim, parts = config.embed_dim, stack_initializers(config)

    def affine(key: PRNGKeyArray) -> Weights:
        return init_linear(key, dim, dim, use_bias=config.use_bias)

    if config.pooler:
        parts["pooler"] = affine
    if config.num_labels:
        parts["classifier"] = lambda key: init_linear(key, dim, config.num_labels)
    if config.transform:
        parts["transform"] = affine
        parts["transform_norm"] = lambda key: init_norm(config.norm, dim, use_bias=config.norm_bias)
    return with_head(parts, config, dim)


encode = transformer.forward  # `hidden` has a contextual vector for each token


def forward(weights: Weights, inputs: Inputs, config: Any, run: Run, cache: None = None) -> Forward:
    """Runs the encoder and, if there is one, BERT's transform in front of the head."""
    encoded = encode(weights, inputs, config, run)
    return encoded._replace(hidden=transform(weights, encoded.hidden, config))


def transform(
    weights: Weights, x: Float[Array, "*batch dim"], config: Any
) -> Float[Array, "*batch dim"]:
    """Computes Norm(act(W x + b)) if the model has BERT's transform; otherwise returns x."""
    if "transform" not in weights:
        return x
    hidden = activate(linear(weights["transform"], x), config.activation)
    return normalize(weights["transform_norm"], hidden, config)


def pooled(
    weights: Weights,
    encoded: Float[Array, "batch length dim"],
    segments: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch dim"]:
    """Computes one vector for each row, tanh(W h + b).

    h is the vector of the row's first token that is not padding.
    """
    first = jnp.zeros(encoded.shape[0], int) if segments is None else (segments != 0).argmax(axis=1)
    rows = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
    return jnp.tanh(linear(weights["pooler"], rows))


def classified(
    weights: Weights,
    encoded: Float[Array, "batch length dim"],
    segments: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch labels"]:
    """Computes float32 logits of each row's classes: an affine map of the pooled vector."""
    return linear(weights["classifier"], pooled(weights, encoded, segments), jnp.float32)


ENCODER = Family(
    initializers,
    forward,
    points=lambda config: POINTS,
    layer_points=lambda config: BLOCK_POINTS,
    masks=transformer.self_attention_masks,
)
