"""Input and output of a language model: token ids to vectors, and hidden states to logits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.family import Weights
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.norms import normalize
from jaxformer.functional.linear.affine import init_linear, linear, map_kernels, soft_cap
from jaxformer.functional.linear.kernels import Int8Table, for_small_steps
from jaxformer.functional.placement import Placement
from jaxformer.functional.positions import sinusoidal_positions
from jaxformer.functional.taps import Tap


def init_embedding(
    key: PRNGKeyArray,
    vocab_size: int,
    dim: int,
    *,
    stddev: float = 0.02,
    learned_positions: int = 0,
    token_types: int = 0,
) -> Weights:
    """Returns tables of vectors for tokens and, if asked for, for positions and token types.

    Token vectors are N(0, stddev²), the rest N(0, 0.02²). A stddev of 0.02 (GPT-2) suits vectors
    that a norm follows. Without a norm 1/√dim suits logits, and the first map of a recurrent model
    compensates for it (`recurrent.initializers`): with 0.02 an LSTM barely starts to learn.

    Args:
        key: a random key.
        vocab_size: number of token vectors.
        dim: number of features.
        stddev: standard deviation of the token vectors.
        learned_positions: number of position vectors.
        token_types: number of vectors for types of tokens.
    """
    tokens, positions = jax.random.split(key)
    weights = {"tokens": stddev * jax.random.normal(tokens, (vocab_size, dim), jnp.float32)}
    if learned_positions:
        weights["positions"] = 0.02 * jax.random.normal(
            positions, (learned_positions, dim), jnp.float32
        )
    if token_types:
        types = jax.random.fold_in(positions, 1)
        weights["token_types"] = 0.02 * jax.random.normal(types, (token_types, dim), jnp.float32)
    return weights


def embed_tokens(
    weights: Weights,
    tokens: Shaped[Array, "batch length *dim"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Looks up token vectors [*batch, length, dim] of ids; vectors instead of ids are only cast.

    The vector of an id outside the table is NaN, never another token's.
    """
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        return _look_up(weights["tokens"], tokens, dtype, placement)
    return tokens.astype(dtype)


def add_positions(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    positions: Int[Array, "*rows length"],
    config: Any,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Adds learned or sinusoidal positions; NaN outside the table of learned ones.

    Returns x if the config has neither.
    """
    if config.positions == "learned":
        index = positions + config.position_offset
        return x + _look_up(weights["positions"], index, x.dtype, placement)
    if config.positions.startswith("sinusoidal"):
        halves = config.positions == "sinusoidal_halves"
        return x + sinusoidal_positions(positions, x.shape[-1], halves=halves).astype(x.dtype)
    return x


def add_token_types(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    token_types: Int[Array, "batch length"] | None,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Adds the vector of each token's type, if the weights have types; None: all types are 0."""
    if "token_types" not in weights:
        return x
    if token_types is None:
        return x + weights["token_types"][0].astype(x.dtype)
    return x + _look_up(weights["token_types"], token_types, x.dtype, placement)


def _look_up(
    table: Float[Array, "words dim"] | Int8Table,
    index: Int[Array, "*batch"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "*batch dim"]:
    in_table = (index >= 0) & (index < table.shape[0])
    index = jnp.where(in_table, index, table.shape[0])  # jnp.take wraps a negative index

    def take(index: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
        if isinstance(table, Int8Table):
            return table.take(index)
        return jnp.take(table, index, axis=0, mode="fill", fill_value=jnp.nan)

    return placement.look_up(take, index, table.shape[0], dtype)


def without_padding(
    x: Shaped[Array, "batch length dim"], segments: Int[Array, "batch length"] | None
) -> Shaped[Array, "batch length dim"]:
    """Zeroes x where segments are 0, so that padding influences no output; None: no padding."""
    return x if segments is None else jnp.where((segments != 0)[..., None], x, 0)


def with_head(parts: dict, config: Any, dim: int) -> dict:
    """Adds the initializer of the head's own weights, if it has any, to `parts`.

    `dim` is the number of features that the head reads.
    """
    size, use_bias = config.vocab_size, config.head_bias
    if not config.tie_embeddings:
        return {**parts, "head": lambda key: init_linear(key, dim, size, use_bias=use_bias)}
    return (
        {**parts, "head": lambda key: {"bias": jnp.zeros(size, jnp.float32)}} if use_bias else parts
    )


def head(weights: Weights) -> Weights:
    """Returns the head's weights for `linear`; a tied kernel is the transposed token table."""
    output = weights.get("head", {})
    return output if "kernel" in output else {"kernel": weights["embedding"]["tokens"].T, **output}


def logits(
    weights: Weights, hidden: Float[Array, "*batch dim"], cap: float | None = None
) -> Float[Array, "*batch vocab"]:
    """Computes hidden W + b in float32 [*batch, vocab], whatever the dtype of the activations.

    With a cap, the result is cap · tanh(y / cap) of these values y.
    """
    return soft_cap(linear(head(weights), hidden, jnp.float32), cap)


def pack_kernels(tree: Any, config: Any, parts: int) -> Any:
    """Converts every affine map in a tree of weights to the layout for decoding.

    Kernels have the compute dtype. Biases and the scales of norms remain float32, as statistics and
    logits are.

    Args:
        tree: weights.
        config: the config with the compute dtype.
        parts: the number of parts of a packed kernel: that of cores that compute in parallel.
    """
    return map_kernels(lambda kernel: for_small_steps(kernel, config.dtype, parts), tree)


def prepare(weights: Weights, config: Any, parts: int = 1) -> dict[str, Any]:
    """Repacks the weights of a model with `layers` for decoding; see `pack_kernels`."""
    layers, output = (pack_kernels(x, config, parts) for x in (weights["layers"], head(weights)))
    return {**weights, "layers": layers, "head": output}


def embed(
    weights: Weights, inputs: Inputs, positions: Int[Array, "*batch length"], config: Any, tap: Tap
) -> Float[Array, "batch length dim"]:
    """Computes token vectors plus positions and types, and their norm if there is one.

    Padding is zero before the norm.
    """
    tables, placement = weights["embedding"], tap.placement
    x = embed_tokens(tables, inputs.tokens, config.dtype, placement)
    if config.scale_embeddings:  # Vaswani et al. 2017, §3.4
        x = x * jnp.asarray(config.embed_dim**0.5, x.dtype)
    x = add_positions(tables, x, positions, config, placement)
    x = add_token_types(tables, x, inputs.token_types, placement)
    x = without_padding(x, inputs.segments)
    return normalize(weights["embedding_norm"], x, config) if config.embedding_norm else x
