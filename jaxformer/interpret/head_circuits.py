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

All functions use the weights that `head_weights` returns, with the norms of the layers folded in.

Reference:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.linear.affine import dense_all
from jaxformer.functional.outputs import head
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import self_attention_layer
from jaxformer.interpret.linear_heads import (
    LINEAR_NORMS,
    check_circuits,
    norm_before,
    weights_of_heads,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.check import as_array
from jaxformer.models.language_model import LanguageModel, Variables


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


def _check_head(model: LanguageModel) -> None:
    if model.architecture.transform is not None:
        raise ValueError(
            "model has BERT's transform before the head; circuits of tokens require a linear head"
        )
    norm = model.architecture.stack.final_norm
    if not isinstance(norm, LINEAR_NORMS):
        raise ValueError(
            f"the model has the norm {type(norm).__name__} before the head; circuits of tokens "
            "require a norm that is linear up to its scale, such as LayerNorm or RMSNorm"
        )


# ---- Composition.

# By default, accelerators round the factors of a float32 product to fewer digits.
_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _gram(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch columns columns"]:
    """Computes xᵀ x."""
    return _product(x.mT, x)


@partial(jax.jit, static_argnums=0)
def _composition(model: LanguageModel, weights: Weights, distance: Int[Array, ""]) -> Composition:
    query, key, value, output = weights_of_heads(model, weights, distance)
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
    heads = weights_of_heads(model, weights, jnp.int32(0))
    tokens, kernel = _token_maps(model, dense_all(weights))
    return _product(_product(heads.output, _product(kernel, tokens)), heads.value)


@partial(jax.jit, static_argnums=0)
def _token_circuits(
    model: LanguageModel,
    weights: Weights,
    ids: Int[Array, " tokens"],
    distance: Int[Array, ""],
) -> TokenCircuits:
    query, key, value, output = weights_of_heads(model, weights, distance)
    tokens, kernel = _token_maps(model, dense_all(weights))
    tokens, kernel = tokens[ids], kernel[:, ids]
    attentions = map(self_attention_layer, model.architecture.stack.layers)
    factors = [x.head_dim**-0.5 if x.scale is None else x.scale for x in attentions]
    scale = jnp.asarray(factors, jnp.float32)[:, None, None, None]
    return TokenCircuits(
        ov=_product(_product(tokens, value), _product(output, kernel)),
        qk=scale * _product(_product(tokens, query), _product(tokens, key).mT),
    )
