"""Circuits of attention heads, computed from the weights alone.

Vectors are rows. A head has the matrices W_Q, W_K, W_V [dim, head_dim] and W_O [head_dim, dim].

    OV = W_V W_O       x OV is what the head writes if it attends only to the token x
    QK = W_Q W_Kᵀ      x QK yᵀ is the attention score of the query token x for the key token y

A later head composes with an earlier head if it reads the output of the earlier head. The
composition scores compare the norm of the product of two circuits with the norms of the circuits:

    query    ‖OV₁ QK₂‖ / (‖OV₁‖ ‖QK₂‖)
    key      ‖OV₁ QK₂ᵀ‖ / (‖OV₁‖ ‖QK₂‖)
    value    ‖OV₁ OV₂‖ / (‖OV₁‖ ‖OV₂‖)

Norms are Frobenius norms. The scores need no matrix [dim, dim], because with M = W_O W_Q,
‖W_V W_O W_Q W_Kᵀ‖² = tr(W_Vᵀ W_V M W_Kᵀ W_K Mᵀ) is a trace of matrices [head_dim, head_dim].

All functions fold the norms of the layers into the weights. With a fixed scale, LayerNorm and
RMSNorm are linear: they subtract the mean (LayerNorm) and multiply by γ. The scale is one number
per token, so it does not change a composition score or a copying score. Without γ, the scores
would weight the features of the residual stream differently from the head. Biases are ignored.

Reference:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.layers.attention import PARTS, Attention
from jaxformer.functional.layers.layer import Layer, Parallel, Residual
from jaxformer.functional.layers.norms import LayerNorm, Norm, RMSNorm, Unapplied
from jaxformer.functional.linear.affine import dense_all
from jaxformer.functional.outputs import head
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    heads_shape,
    mixed_layers,
    self_attention_layer,
    weights_of_layer,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.check import as_array
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables

# Classes of norms that are linear if the scale is fixed.
_LINEAR_NORMS = (type(None), LayerNorm, RMSNorm, Unapplied)


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


class Composition(NamedTuple):
    """Composition scores of all pairs of heads, from 0 to 1.

    The first two axes are the layer and index of the earlier head. The last two axes are the layer
    and index of the later head. Entries whose second layer is not later than the first layer are 0.
    Circuits that read and write random directions have scores of about 1/√dim.

    Attributes:
        query: the scores of query composition.
        key: the scores of key composition.
        value: the scores of value composition.
    """

    query: Float[Array, "layers heads layers heads"]
    key: Float[Array, "layers heads layers heads"]
    value: Float[Array, "layers heads layers heads"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class TokenCircuits(NamedTuple):
    """The circuits of each head between the vectors of chosen tokens, without positions.

    Attributes:
        ov: entry [a, b] is what the head adds to the logit of token b if the head attends only to
            token a, before a soft cap of the logits.
        qk: entry [a, b] is the attention score of the query token a for the key token b, before a
            soft cap and without a bias for the positions.
    """

    ov: Float[Array, "layers heads tokens tokens"]
    qk: Float[Array, "layers heads tokens tokens"]

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
            default 0, QK is W_Q W_Kᵀ without a rotation.

    Raises:
        ValueError: An argument is invalid, or the circuits of the model are not linear.
    """
    check_circuits(model, variables, distance)
    return _head_weights(model, variables["params"], jnp.int32(distance))


def composition_scores(
    model: LanguageModel, variables: Variables, distance: int = 0
) -> Composition:
    """Computes how strongly each head composes with each head of a later layer.

    Args:
        model: see `head_weights`.
        variables: the model's variables.
        distance: see `head_weights`.

    Raises:
        ValueError: An argument is invalid, or the circuits of the model are not linear.
    """
    check_circuits(model, variables, distance)
    return _composition(model, variables["params"], jnp.int32(distance))


def copying_scores(model: LanguageModel, variables: Variables) -> Float[np.ndarray, "layers heads"]:
    """Computes Σλ / Σ|λ| over the eigenvalues λ of each head's full OV circuit.

    The full OV circuit W_E OV W_U [vocab, vocab] maps an attended token to logits. If the score is
    1, all nonzero eigenvalues are positive: attention to a token tends to raise the logit of the
    same token. If the score is −1, attention tends to lower this logit. The matrix W_O W_U W_E W_V
    [head_dim, head_dim] has the same nonzero eigenvalues.

    Args:
        model: see `head_weights`; the model must not have BERT's transform before the head.
        variables: the model's variables.

    Raises:
        ValueError: An argument is invalid, or the circuits of the model are not linear.
    """
    check_circuits(model, variables, 0)
    _check_head(model)
    matrices = np.asarray(_copying_matrices(model, variables["params"]), np.float64)
    # JAX computes eigenvalues of general matrices only on some devices.
    values = np.linalg.eigvals(matrices)
    sizes = abs(values).sum(axis=-1)
    return (values.sum(axis=-1).real / np.where(sizes == 0, 1, sizes)).astype(np.float32)


def token_circuits(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, " tokens"],
    distance: int = 0,
) -> TokenCircuits:
    """Computes the full OV circuit W_E OV W_U and the full QK circuit W_E QK W_Eᵀ for some tokens.

    The divisors of the norms of the layers and of the norm before the head are treated as 1. A norm
    of the embedding is computed exactly. `qk` contains the factor of the scores, such as
    1/√head_dim, and `ov` contains the factors of the embedding and of the output.

    Args:
        model: see `copying_scores`.
        variables: the model's variables.
        tokens: token ids, int [tokens].
        distance: see `head_weights`.

    Raises:
        ValueError: An argument is invalid, or the circuits of the model are not linear.
    """
    check_circuits(model, variables, distance)
    _check_head(model)
    ids, vocab_size = as_array("tokens", tokens), model.config.vocab_size
    if ids.ndim != 1 or not ids.size or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"tokens are {ids.dtype} {ids.shape}; they must be int [tokens]")
    if (ids < 0).any() or (ids >= vocab_size).any():
        raise ValueError(f"tokens are {ids}; they must be ids from 0 to {vocab_size - 1}")
    return _token_circuits(model, variables["params"], jnp.asarray(ids), jnp.int32(distance))


# ---- Checks.


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
    if whole_number("distance", distance, 0) and not has_rotary:
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
        if not isinstance(norm, _LINEAR_NORMS):
            return (
                f"has the norm {type(norm).__name__}; circuits require a norm that is linear up to "
                "its scale, such as LayerNorm or RMSNorm"
            )
    return None


def _check_head(model: LanguageModel) -> None:
    if model.architecture.transform is not None:
        raise ValueError(
            "model has BERT's transform before the head; circuits of tokens require a linear head"
        )
    norm = model.architecture.stack.final_norm
    if not isinstance(norm, _LINEAR_NORMS):
        raise ValueError(
            f"the model has the norm {type(norm).__name__} before the head; circuits of tokens "
            "require a norm that is linear up to its scale, such as LayerNorm or RMSNorm"
        )


# ---- Weights of heads.


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
    """Computes L W, so that x (L W) is the product of W and the norm of x with scale 1."""
    if isinstance(norm, LayerNorm):
        scaled = weights["scale"][:, None] * kernel
        return scaled - scaled.mean(axis=0)
    return norm.gain(weights)[:, None] * kernel if isinstance(norm, RMSNorm) else kernel


def _weights_of_heads(layer: Layer, weights: Weights, distance: Int[Array, ""]) -> HeadWeights:
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
def _head_weights(model: LanguageModel, weights: Weights, distance: Int[Array, ""]) -> HeadWeights:
    weights = dense_all(weights)
    layers = [
        _weights_of_heads(layer, weights_of_layer(weights, number), distance)
        for number, layer in enumerate(model.architecture.stack.layers)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


# ---- Composition.

# By default, accelerators round the factors of a float32 product to fewer digits.
_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _gram(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch columns columns"]:
    """Computes xᵀ x."""
    return _product(x.mT, x)


@partial(jax.jit, static_argnums=0)
def _composition(model: LanguageModel, weights: Weights, distance: Int[Array, ""]) -> Composition:
    query, key, value, output = _head_weights(model, weights, distance)
    num_layers, num_heads, dim, size = query.shape
    # For each pair (x, y), x yᵀ is the circuit of the later head.
    pairs = ((query, key), (key, query), (value, output.mT))
    grams = jnp.stack([_gram(y) for _, y in pairs], axis=1)
    written = _gram(value)
    norms = jnp.stack([(_gram(x) * _gram(y)).sum((-2, -1)) for x, y in pairs], axis=1)
    # With this layout, a pair of layers needs only one matrix product over the axis of size dim.
    writers = output.reshape(num_layers, -1, dim)
    readers = jnp.stack([x for x, _ in pairs], axis=1)
    readers = jnp.moveaxis(readers, 3, 1).reshape(num_layers, dim, -1)
    earlier, later = np.triu_indices(num_layers, 1)

    def scores(pair: tuple[Array, Array]) -> Float[Array, "3 heads heads"]:
        first, second = pair
        product = _product(writers[first], readers[second])
        product = product.reshape(num_heads, size, 3, num_heads, size).transpose(2, 0, 3, 1, 4)
        left = _product(written[first][None, :, None], product)
        left = _product(left, grams[second][:, None])
        squares = jnp.maximum((left * product).sum((-2, -1)), 0.0)
        scale = norms[first, 2][:, None] * norms[second][:, None]
        return jnp.sqrt(squares / jnp.where(scale == 0.0, 1.0, scale))

    found = jnp.zeros((num_layers, num_layers, 3, num_heads, num_heads), jnp.float32)
    if num_layers > 1:
        layers = (jnp.asarray(earlier, jnp.int32), jnp.asarray(later, jnp.int32))
        found = found.at[earlier, later].set(jax.lax.map(scores, layers))
    return Composition(*found.transpose(2, 0, 3, 1, 4))


# ---- Circuits of tokens.


def _token_maps(
    model: LanguageModel, weights: Weights
) -> tuple[Float[Array, "vocab dim"], Float[Array, "dim vocab"]]:
    """Returns (W_E, W_U): vectors of tokens without positions, and the head with its norm."""
    embedding, stack = model.architecture.embedding, model.architecture.stack
    tokens = weights["embedding"]["tokens"].astype(jnp.float32)
    if embedding.is_scaled:
        tokens = tokens * embedding.dim**0.5
    if embedding.norm is not None:
        tokens = embedding.norm(weights["embedding_norm"], tokens)
    kernel = head(weights)["kernel"].astype(jnp.float32)
    kernel = norm_before(stack.final_norm, weights.get("final_norm", {}), kernel)
    return tokens, kernel * (1.0 if stack.output_scale is None else stack.output_scale)


@partial(jax.jit, static_argnums=0)
def _copying_matrices(
    model: LanguageModel, weights: Weights
) -> Float[Array, "layers heads head_dim head_dim"]:
    """Computes W_O W_U W_E W_V for each head."""
    heads = _head_weights(model, weights, jnp.int32(0))
    tokens, kernel = _token_maps(model, dense_all(weights))
    return _product(_product(heads.output, _product(kernel, tokens)), heads.value)


@partial(jax.jit, static_argnums=0)
def _token_circuits(
    model: LanguageModel,
    weights: Weights,
    ids: Int[Array, " tokens"],
    distance: Int[Array, ""],
) -> TokenCircuits:
    query, key, value, output = _head_weights(model, weights, distance)
    tokens, kernel = _token_maps(model, dense_all(weights))
    tokens, kernel = tokens[ids], kernel[:, ids]
    attentions = map(self_attention_layer, model.architecture.stack.layers)
    factors = [x.head_dim**-0.5 if x.scale is None else x.scale for x in attentions]
    scale = jnp.asarray(factors, jnp.float32)[:, None, None, None]
    return TokenCircuits(
        ov=_product(_product(tokens, value), _product(output, kernel)),
        qk=scale * _product(_product(tokens, query), _product(tokens, key).mT),
    )
