"""Weights of attention heads, with the norms of the layers folded in.

The functions of `head_circuits` compute circuits from these weights. Vectors are rows. A head has
the matrices W_Q, W_K, W_V [dim, head_dim] and W_O [head_dim, dim].

With a fixed scale, LayerNorm and RMSNorm are linear: they subtract the mean (LayerNorm) and
multiply by γ. The scale is one number per token, so it does not change a composition score or a
copying score. Without γ, the scores would weight the features of the residual stream differently
from the head. Biases are ignored.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.layers.attention import PARTS, Attention
from jaxformer.functional.layers.layer import Layer, Parallel, Residual
from jaxformer.functional.layers.norms import LayerNorm, Norm, RMSNorm, Unapplied
from jaxformer.functional.linear.affine import dense_all
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    heads_shape,
    mixed_layers,
    self_attention_layer,
    weights_of_layer,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables

# Classes of norms that are linear if the scale is fixed.
LINEAR_NORMS = (type(None), LayerNorm, RMSNorm, Unapplied)


class HeadWeights(NamedTuple):
    """The weights of each head of self-attention, with the norms of the layers folded in.

    With grouped-query attention, query heads of one group have equal `key` and `value`.

    Attributes:
        query: W_Q.
        key: W_K.
        value: W_V.
        output: W_O.
    """

    query: Float[Array, "*layers heads dim head_dim"]
    key: Float[Array, "*layers heads dim head_dim"]
    value: Float[Array, "*layers heads dim head_dim"]
    output: Float[Array, "*layers heads head_dim dim"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def head_weights(model: LanguageModel, variables: Variables, distance: int = 0) -> HeadWeights:
    """Returns the weights of all heads of self-attention, with the norms folded in.

    Args:
        model: a Transformer whose layers add their outputs to a residual stream, without a norm of
            the sum.
        variables: the model's variables.
        distance: for rotary positions, the position of the query minus the position of the key.
            Rotary positions rotate queries and keys, so QK depends on this distance. With the
            default 0, QK is W_Q W_Kᵀ without a rotation. Encoders also accept negative distances.

    Raises:
        ValueError: An argument is invalid, or the circuits of the model are not linear.
    """
    check_circuits(model, variables, distance)
    return weights_of_heads(model, variables["params"], jnp.int32(distance))


def check_circuits(model: LanguageModel, variables: Variables, distance: Any) -> None:
    """Raises ValueError unless the circuits of the model's heads are linear, up to scales."""
    heads_shape(model, "attention")
    model.check(variables)
    if (reason := mixed_layers(model)) is not None:
        raise ValueError(reason)
    layers = model.architecture.stack.layers
    for number, layer in enumerate(layers):
        if (reason := _nonlinear(layer)) is not None:
            raise ValueError(f"layer {number} of the model {reason}")
    has_rotary = any(self_attention_layer(layer).rotary is not None for layer in layers)
    # In a bidirectional model, a query may stand before its key.
    least = 1 - model.config.max_length if model.config.bidirectional else 0
    if whole_number("distance", distance, least) and not has_rotary:
        raise ValueError(
            f"distance is {distance}; it must be 0, because the model has no rotary positions"
        )


def _nonlinear(layer: Layer) -> str | None:
    """Returns the reason why the circuits of a layer are not linear, or None."""
    for part in layer:
        if not part.adds:
            return "has no residual connection; circuits require a residual stream"
        if isinstance(part, Residual) and part.norm is not None and part.norm_position == "post":
            return (
                "has norm_position 'post'; circuits require 'pre', 'sandwich' or 'post_sublayer', "
                "because a norm of the residual stream changes what earlier heads wrote"
            )
    attention, part = self_attention_layer(layer), _attention_part(layer)
    if attention.has_gate:
        return "has attention_gate; circuits require heads without a gate, which is not linear"
    for norm in (part.norm, getattr(part, "output_norm", None), attention.query_key_norm):
        if not isinstance(norm, LINEAR_NORMS):
            return (
                f"has the norm {type(norm).__name__}; circuits require a norm that is linear up to "
                "its scale, such as LayerNorm or RMSNorm"
            )
    return None


def _attention_part(layer: Layer) -> Residual | Parallel:
    """Returns the part of a layer that contains self-attention."""
    return next(part for part in layer if any(isinstance(x, Attention) for x in part.sublayers))


def norm_after(
    norm: Norm | None, weights: Weights, x: Float[Array, "*batch dim"]
) -> Float[Array, "*batch dim"]:
    """Computes x L, where L is the linear part of a norm with scale 1.

    For LayerNorm, x L is γ ⊙ (x − mean(x)), and for RMSNorm γ ⊙ x.
    """
    if isinstance(norm, LayerNorm):
        return (x - x.mean(axis=-1, keepdims=True)) * weights["scale"]
    return x * norm.gain(weights) if isinstance(norm, RMSNorm) else x


def norm_before(
    norm: Norm | None, weights: Weights, kernel: Float[Array, "dim out"]
) -> Float[Array, "dim out"]:
    """Computes L W, which folds the linear part L of a norm into the kernel W after it."""
    if isinstance(norm, LayerNorm):
        scaled = weights["scale"][:, None] * kernel
        return scaled - scaled.mean(axis=0)
    return norm.gain(weights)[:, None] * kernel if isinstance(norm, RMSNorm) else kernel


def _weights_of_layer(layer: Layer, weights: Weights, distance: Int[Array, ""]) -> HeadWeights:
    """Returns the weights of the heads of one layer."""
    part, attention, own = _attention_part(layer), self_attention_layer(layer), weights["attention"]
    name = part.norm_name(attention) if isinstance(part, Parallel) else "attention_norm"
    norm_weights = weights.get(name, {})
    kernels = {side: own[side]["kernel"].astype(jnp.float32) for side in (*PARTS, "output")}
    if isinstance(part, Residual) and part.norm_position == "post_sublayer":
        kernels["output"] = norm_after(part.norm, norm_weights, kernels["output"])
    else:
        for side in PARTS:
            kernels[side] = norm_before(part.norm, norm_weights, kernels[side])
    if isinstance(part, Residual) and part.output_norm is not None:
        output_weights = weights["attention_output_norm"]
        kernels["output"] = norm_after(part.output_norm, output_weights, kernels["output"])
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    query = split_heads(kernels["query"], num_heads)
    key, value = (split_heads(kernels[side], num_kv_heads) for side in ("key", "value"))
    query = _query_or_key(attention, own.get("query_norm", {}), query, distance)
    key = _query_or_key(attention, own.get("key_norm", {}), key, jnp.int32(0))
    key, value = (jnp.repeat(x, num_heads // num_kv_heads, axis=0) for x in (key, value))
    output = kernels["output"].reshape(num_heads, attention.head_dim, -1)
    return HeadWeights(query, key, value, output)


def _query_or_key(
    attention: Attention,
    norm_weights: Weights,
    x: Float[Array, "heads dim head_dim"],
    position: Int[Array, ""],
) -> Float[Array, "heads dim head_dim"]:
    """Applies the linear part of the query or key norm, and the rotation for a position."""
    norm = attention.query_key_norm
    if attention.norms_all_heads:
        x = split_heads(norm_after(norm, norm_weights, merge_heads(x)), len(x))
    else:
        x = norm_after(norm, norm_weights, x)
    if attention.rotary is None:
        return x
    return attention.rotary(x, jnp.broadcast_to(position, x.shape[1:2]))


@partial(jax.jit, static_argnums=0)
def weights_of_heads(
    model: LanguageModel, weights: Weights, distance: Int[Array, ""]
) -> HeadWeights:
    """Returns the weights of all heads, like `head_weights`, but without checking the arguments."""
    weights = dense_all(weights)
    layers = [
        _weights_of_layer(layer, weights_of_layer(weights, number), distance)
        for number, layer in enumerate(model.architecture.stack.layers)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)
