"""The Transformer decoder in the words of the lecture notes, for plain arrays of weights.

    pre-norm:  y₁ = x + Attention(LN(x))    y₂ = y₁ + FFN(LN(y₁))
    post-norm: y₁ = LN(x + Attention(x))    y₂ = LN(y₁ + FFN(y₁))

The functions compute what `jaxformer.Decoder` computes, from the parameters of such a model.
`layers.layer` and `stack` compute the same layers with caches, packed documents and hook points.

Reference:
    Notes, lecture 11 §3 and §6.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.arguments import check_choice, checks_arguments, whole_number
from jaxformer.functional.attention.masks import Causal, Mask
from jaxformer.functional.attention.own_masks import MaskFunction
from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.feedforward import (
    Activation,
    FeedForward,
    check_activation,
    feed_forward,
)
from jaxformer.functional.layers.layer import Residual, init_layer
from jaxformer.functional.layers.multi_head import multi_head_attention
from jaxformer.functional.layers.norms import LayerNorm, layer_norm
from jaxformer.functional.layers.sublayer import Initial
from jaxformer.functional.outputs import logits
from jaxformer.functional.position_vectors import encode_positions
from jaxformer.functional.tables import embed
from jaxformer.functional.trees import Weights, unstack
from jaxformer.terminal import kind_of

# A function of the vectors of all tokens, such as attention with its weights.
Function = Callable[[Float[Array, "*batch length dim"]], Float[Array, "*batch length dim"]]

_PARTS = ("attention", "attention_norm", "feedforward", "feedforward_norm")


def add_residual(
    function: Function, x: Float[Array, "*batch length dim"]
) -> Float[Array, "*batch length dim"]:
    """Computes x + F(x)."""
    return x + function(x)


def norm_before(
    function: Function, x: Float[Array, "*batch length dim"], norm: Function
) -> Float[Array, "*batch length dim"]:
    """Computes x + F(Norm(x)), a residual connection with pre-norm (GPT-2)."""
    return x + function(norm(x))


def norm_after(
    function: Function, x: Float[Array, "*batch length dim"], norm: Function
) -> Float[Array, "*batch length dim"]:
    """Computes Norm(x + F(x)), a residual connection with post-norm (Vaswani et al. 2017)."""
    return norm(add_residual(function, x))


def init_transformer_block(
    key: PRNGKeyArray,
    dim: int,
    num_heads: int,
    mlp_dim: int | None = None,
    *,
    activation: Activation = "gelu_tanh",
) -> Weights:
    """Returns initial weights of `transformer_block`.

    Args:
        key: a random key.
        dim: the number of features of a token's vector.
        num_heads: the number of heads, which must divide `dim`.
        mlp_dim: the number of hidden features of the feed-forward layer; defaults to 4 · dim.
        activation: the activation of the feed-forward layer; a gated activation adds a linear layer
            for the gate.

    Raises:
        ValueError: `num_heads` does not divide `dim`.
    """
    check_activation(activation)
    if dim % whole_number("num_heads", num_heads, 1):
        raise ValueError(f"num_heads is {num_heads}; it must divide dim ({dim})")
    attention = Attention(num_heads, num_heads, dim // num_heads)
    feed = FeedForward(mlp_dim or 4 * dim, activation)
    layer = (Residual(attention, LayerNorm()), Residual(feed, LayerNorm()))
    return init_layer(layer, Initial(1), dim, key)


def _check_block(weights: Any, norm_position: str, norm: Any, **_: object) -> None:
    if not callable(norm):
        raise TypeError(f"norm is {norm!r}; it must be a function, such as layer_norm")
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is {kind_of(weights)}; it must be a dictionary")
    check_choice("norm_position", norm_position, ("pre", "post"))
    missing = [name for name in _PARTS if name not in weights]
    if missing:
        raise ValueError(
            f"weights has no {missing[0]!r}; a block needs the weights {', '.join(_PARTS)}"
        )


@checks_arguments(_check_block)
def transformer_block(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    mask: Mask
    | MaskFunction
    | Shaped[Array | np.ndarray, "*mask_batch length length"]
    | None = None,
    *,
    num_heads: int,
    activation: Activation = "gelu_tanh",
    norm: Callable[..., Array] = layer_norm,
    norm_position: Literal["pre", "post"] = "pre",
) -> Float[Array, "*batch length dim"]:
    """Computes a Transformer block: attention and feed-forward layer, with norms and residuals.

    Args:
        weights: the weights "attention", "attention_norm", "feedforward" and "feedforward_norm".
            `init_transformer_block` returns such weights, and each layer of a `jaxformer.Decoder`
            has them.
        x: the vectors of the tokens.
        mask: which tokens each token attends to; see `dot_product_attention`.
        num_heads: the number of query heads.
        activation: the activation of the feed-forward layer.
        norm: the norm, such as `layer_norm` or `rms_norm`.
        norm_position: "pre" (`norm_before`) or "post" (`norm_after`).

    Raises:
        ValueError: The weights or `norm_position` do not fit.

    Reference:
        Notes, lecture 11 §3.
    """
    attend = partial(multi_head_attention, weights["attention"], mask=mask, num_heads=num_heads)
    feed = partial(feed_forward, weights["feedforward"], activation=activation)
    add_and_norm = norm_before if norm_position == "pre" else norm_after
    x = add_and_norm(attend, x, partial(norm, **weights["attention_norm"]))
    return add_and_norm(feed, x, partial(norm, **weights["feedforward_norm"]))


def _check_decoder(weights: Any, **_: object) -> None:
    for name in ("embedding", "blocks", "final_norm"):
        if not isinstance(weights, Mapping) or name not in weights:
            raise ValueError(
                f"weights has no {name!r}; pass the parameters of a jaxformer.Decoder with the "
                "default norm and positions, variables['params']"
            )
    missing = {"tokens", "positions"} - weights["embedding"].keys()
    if missing:
        raise ValueError(
            f"weights['embedding'] has no {min(missing)!r}; the decoder function needs learned "
            "positions"
        )


@checks_arguments(_check_decoder)
def decoder(
    weights: Weights,
    tokens: Int[Array, "*batch length"],
    mask: Mask
    | MaskFunction
    | Shaped[Array | np.ndarray, "*mask_batch length length"]
    | None = Causal(),  # noqa: B008 (frozen)
    *,
    num_heads: int,
    activation: Activation = "gelu_tanh",
) -> Float[Array, "*batch length vocab"]:
    """Computes the logits of a decoder: embedding, positions, blocks with pre-norm, norm and head.

    Args:
        weights: the parameters of a `jaxformer.Decoder` with the default norm and positions, such
            as `model.init(key, tokens)["params"]`.
        tokens: the token ids.
        mask: which tokens each token attends to; see `dot_product_attention`.
        num_heads: the number of query heads.
        activation: the activation of the feed-forward layers.

    Reference:
        Notes, lecture 11 §6.
    """
    x = embed(weights["embedding"]["tokens"], tokens)
    x = encode_positions(x, weights["embedding"]["positions"])
    num_layers = len(jax.tree.leaves(weights["blocks"])[0])
    for layer in unstack(weights["blocks"], num_layers):
        x = transformer_block(layer, x, mask, num_heads=num_heads, activation=activation)
    return logits(weights, layer_norm(x, **weights["final_norm"]))


def _check_greedy(next_logits: Any, tokens: Any, num_tokens: int) -> None:
    whole_number("num_tokens", num_tokens, 0)
    if not callable(next_logits):
        raise TypeError(f"next_logits is {kind_of(next_logits)}; it must be a function")
    if not tokens.shape[-1]:
        raise ValueError("tokens is empty; the prompt must have at least one token")


@checks_arguments(_check_greedy)
def greedy_decode(
    next_logits: Callable[[Int[Array, "*batch length"]], Float[Array, "*batch length vocab"]],
    tokens: Int[Array, "*batch prompt"],
    num_tokens: int,
) -> Int[Array, "*batch length"]:
    """Appends the most likely next token to a prompt, `num_tokens` times.

    Each step computes the logits of the whole sequence again. `jaxformer.generate` computes the
    same tokens with a cache.

    Args:
        next_logits: computes the logits of all positions; the logits at position t predict token
            t + 1. They must not depend on tokens after position t.
        tokens: the prompt, with at least one token.
        num_tokens: the number of new tokens.

    Returns:
        The prompt and the new tokens.

    Reference:
        Notes, lecture 11 §7.
    """
    length = tokens.shape[-1]
    padded = jnp.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, num_tokens)])

    def append(t: Int[Array, ""], tokens: Int[Array, "*batch length"]) -> Int[Array, "..."]:
        scores = jax.lax.dynamic_index_in_dim(next_logits(tokens), t - 1, axis=-2, keepdims=False)
        return tokens.at[..., t].set(scores.argmax(axis=-1).astype(tokens.dtype))

    return jax.lax.fori_loop(length, length + num_tokens, append, padded)
