"""Attention with its linear layers, for plain arrays of weights.

    q = x W_Q    k = x W_K    v = x W_V    y = softmax(q kᵀ/√d) v

The sub-layers `Attention` and `CrossAttention` compute the same function from the same weights, and
also support caches, packed documents and hook points.

Reference:
    Notes, lecture 10 §1–3, lecture 11 §4.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxformer.functional.arguments import check_maps, checks_arguments, whole_number
from jaxformer.functional.attention.dot_product import scaled_dot_product_attention
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.own_masks import MaskFunction
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.trees import Weights
from jaxformer.terminal import kind_of


def _check_heads(
    weights: Any, x: Float[Any, "*batch dim"], num_heads: int, source: Any = None, **_: object
) -> None:
    """Raises ValueError unless the weights fit x, the source and the number of heads."""
    whole_number("num_heads", num_heads, 1)
    dim, source_dim = x.shape[-1], (x if source is None else source).shape[-1]
    sizes = {"query": (dim, None), "key": (source_dim, None), "value": (source_dim, None)}
    check_maps("weights", weights, {**sizes, "output": (None, None)})
    width = weights["query"]["kernel"].shape[-1]
    if width % num_heads:
        raise ValueError(
            f"num_heads is {num_heads}; it must divide the {width} features of the queries"
        )
    head_dim = width // num_heads
    check_maps("weights", weights, {"output": (width, None)})
    for name in ("key", "value"):
        features = weights[name]["kernel"].shape[-1]
        if features % head_dim or num_heads % (features // head_dim):
            raise ValueError(
                f"weights[{name!r}]['kernel'] has {features} columns; they must form heads of "
                f"{head_dim} features, and the number of these heads must divide num_heads "
                f"({num_heads})"
            )


@checks_arguments(_check_heads)
def multi_head_attention(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    mask: Mask | MaskFunction | Shaped[Array | np.ndarray, "*mask_batch length keys"] | None = None,
    *,
    num_heads: int,
    source: Float[Array, "*batch keys source_dim"] | None = None,
    scale: float | None = None,
) -> Float[Array, "*batch length out_dim"]:
    """Computes W_O [o¹, …, o^H], where head h is o^h = softmax(q^h (k^h)ᵀ · scale) v^h.

    Args:
        weights: the linear layers "query", "key", "value" and "output", each {"kernel": [inputs,
            outputs]} with an optional "bias". If the keys have fewer features than the queries,
            several query heads share a key head (grouped-query attention).
        x: the tokens, from which the queries are computed.
        mask: which tokens each token attends to; see `dot_product_attention`.
        num_heads: the number of query heads H.
        source: the tokens from which keys and values are computed; defaults to x.
        scale: the factor of the scores; defaults to 1/√head_dim.

    Raises:
        ValueError: Weights, inputs and `num_heads` do not fit each other.

    Reference:
        Vaswani et al. 2017, §3.2.2; notes, lecture 11 §4.
    """
    source = x if source is None else source
    query = split_heads(linear(weights["query"], x), num_heads)
    head_dim = query.shape[-1]
    key, value = (linear(weights[name], source) for name in ("key", "value"))
    key, value = (split_heads(y, y.shape[-1] // head_dim) for y in (key, value))
    heads = scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return linear(weights["output"], merge_heads(heads))


def _check_self(weights: Any, x: Any, **_: object) -> None:
    _check_cross(weights, x, x)


def _check_cross(weights: Any, x: Any, source: Any, **_: object) -> None:
    matrices = as_linear_layers(weights) if isinstance(weights, Mapping) else weights
    sizes = {"query": x.shape[-1], "key": source.shape[-1], "value": source.shape[-1]}
    check_maps("weights", matrices, {name: (dim, None) for name, dim in sizes.items()})


@checks_arguments(_check_self)
def self_attention(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    mask: Mask
    | MaskFunction
    | Shaped[Array | np.ndarray, "*mask_batch length length"]
    | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "*batch length v"]:
    """Computes softmax(X Q (X K)ᵀ · scale) X V, one head of attention of x to itself.

    Args:
        weights: the linear layers "query", "key" and "value". Each is a matrix [inputs, outputs],
            or {"kernel": matrix} with an optional "bias".
        x: the tokens.
        mask: which tokens each token attends to; see `dot_product_attention`.
        scale: the factor of the scores; defaults to 1/√d.

    Reference:
        Notes, lecture 10 §3, lecture 11 §5.
    """
    return cross_attention(weights, x, x, mask, scale=scale)


@checks_arguments(_check_cross)
def cross_attention(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    source: Float[Array, "*batch keys source_dim"],
    mask: Mask | MaskFunction | Shaped[Array | np.ndarray, "*mask_batch length keys"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "*batch length v"]:
    """Computes softmax(X Q (E K)ᵀ · scale) E V, one head of attention of x to a source E.

    Args:
        weights: the linear layers "query", "key" and "value"; see `self_attention`.
        x: the tokens, from which the queries are computed.
        source: the tokens E, from which keys and values are computed.
        mask: which tokens of the source each token attends to; see `dot_product_attention`.
        scale: the factor of the scores; defaults to 1/√d.

    Reference:
        Notes, lecture 10 §1, lecture 13 §4.
    """
    weights = as_linear_layers(weights)
    query, key, value = (
        linear(weights[name], y) for name, y in (("query", x), ("key", source), ("value", source))
    )
    return scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _check_cache(key: Any, value: Any, cache: Any) -> None:
    """Raises ValueError unless the new keys and values fit the cached keys and values."""
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key {key.shape} and value {value.shape} must have equal shapes except for the last "
            "axis"
        )
    if cache is None:
        return
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise TypeError(f"cache is {kind_of(cache)}; it must be a pair (keys, values)")
    for name, new, old in (("key", key, cache[0]), ("value", value, cache[1])):
        if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1]:
            raise ValueError(
                f"{name} is {new.shape} and cache has {old.shape}; they must have equal shapes "
                "except for the axis of tokens (the second-to-last)"
            )


@checks_arguments(_check_cache)
def kv_cache(
    key: Float[Array, "*batch new d"],
    value: Float[Array, "*value_batch new_values v"],
    cache: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "*batch keys d"], Float[Array, "*batch keys v"]]:
    """Appends the keys and values of new tokens to those of earlier tokens.

    The result grows with each call, as in lecture 13. A compiled loop needs arrays of constant
    shape, which `jaxformer.init_cache` provides.

    Args:
        key: the keys of the new tokens.
        value: the values of the new tokens.
        cache: the result for the earlier tokens; None for the first tokens.

    Reference:
        Notes, lecture 13 §7.
    """
    if cache is None:
        return key, value
    keys, values = (jnp.concatenate(x, axis=-2) for x in zip(cache, (key, value), strict=True))
    return keys, values


def as_linear_layers(weights: Weights) -> Weights:
    """Replaces each matrix W in a dictionary of linear layers by {"kernel": W}."""
    return {
        name: layer if isinstance(layer, Mapping) else {"kernel": layer}
        for name, layer in weights.items()
    }
