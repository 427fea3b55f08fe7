"""The two ends of a language model: ids to vectors, and hidden states to logits."""

import jax
import jax.numpy as jnp

from jaxformer.functional.kernels import Int8Table, for_small_steps
from jaxformer.functional.linear import capped, each_kernel, init_linear, linear
from jaxformer.functional.positions import sinusoidal_positions
from jaxformer.functional.spread import look_up


def init_embedding(
    key,
    vocab_size: int,
    dim: int,
    *,
    stddev: float = 0.02,
    learned_positions: int = 0,
    token_types: int = 0,
):
    """N(0, stddev²), a vector for each token, and N(0, 0.02²), if asked for, for each position and
    each type of a token.

    0.02 (GPT-2) is for what is normalised before it is used. Without a norm 1/√dim suits logits,
    and the first map of a recurrent model makes up for it (`recurrent.initializers`): at 0.02 an
    LSTM hardly begins to learn.
    """
    tokens, positions = jax.random.split(key)
    weights = {"tokens": stddev * jax.random.normal(tokens, (vocab_size, dim))}
    if learned_positions:
        weights["positions"] = 0.02 * jax.random.normal(positions, (learned_positions, dim))
    if token_types:
        types = jax.random.fold_in(positions, 1)
        weights["token_types"] = 0.02 * jax.random.normal(types, (token_types, dim))
    return weights


def embed_tokens(weights, tokens, dtype):
    """Rows of the token table [*batch, length, dim] for ids; floats in their place pass through.

    An id outside the table gives NaN, never some other row.
    """
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        return _rows_of_table(weights["tokens"], tokens, dtype)
    return tokens.astype(dtype)


def add_positions(weights, x, positions, config):
    """x + p, where positions are learned (NaN outside the table) or sinusoidal; else x as it is."""
    if config.positions == "learned":
        return x + _rows_of_table(weights["positions"], positions + config.position_offset, x.dtype)
    if config.positions.startswith("sinusoidal"):
        halves = config.positions == "sinusoidal_halves"
        return x + sinusoidal_positions(positions, x.shape[-1], halves=halves).astype(x.dtype)
    return x


def add_token_types(weights, x, token_types=None):
    """x + the vector of each token's type, where there are types; None: all 0."""
    if "token_types" not in weights:
        return x
    if token_types is None:
        return x + weights["token_types"][0].astype(x.dtype)
    return x + _rows_of_table(weights["token_types"], token_types, x.dtype)


def _rows_of_table(table, index, dtype):
    in_table = (index >= 0) & (index < table.shape[0])
    index = jnp.where(in_table, index, table.shape[0])  # a negative index would wrap

    def take(index):
        if isinstance(table, Int8Table):
            return table.take(index)
        return jnp.take(table, index, axis=0, mode="fill", fill_value=jnp.nan)

    return look_up(take, index, table.shape[0], dtype)


def without_padding(x, segments):
    """Zeros where segments are 0: what stands in padding reaches nothing. None: no padding."""
    return x if segments is None else jnp.where((segments != 0)[..., None], x, 0)


def with_head(parts: dict, config, dim: int) -> dict:
    """The initialisers of `parts` and that of the head, from `dim` features to logits, if it has
    weights of its own."""
    size, use_bias = config.vocab_size, config.head_bias
    if not config.tie_embeddings:
        return {**parts, "head": lambda key: init_linear(key, dim, size, use_bias=use_bias)}
    return {**parts, "head": lambda key: {"bias": jnp.zeros(size)}} if use_bias else parts


def head(weights):
    """The output map as the weights of `linear`; without a matrix of its own, the embedding's."""
    own = weights.get("head", {})
    return own if "kernel" in own else {"kernel": weights["embedding"]["tokens"].T, **own}


def logits(weights, hidden, cap: float | None = None):
    """hidden W + b in float32 [*batch, vocab], whatever the dtype of the activations; with a cap,
    cap · tanh(y / cap) of that."""
    return capped(linear(head(weights), hidden, jnp.float32), cap)


def pack_all(tree, config, parts: int):
    """Every affine map of a tree of weights as many small steps want it, in the compute dtype;
    biases and the scales of norms stay float32, as statistics and logits are.

    parts: into how many a matrix is cut, as many as there are cores that compute side by side.
    """
    return each_kernel(lambda kernel: for_small_steps(kernel, config.dtype, parts), tree)


def prepare(weights, config, parts: int = 1):
    """The weights of a model made of `layers` as many small steps want them: see `pack_all`."""
    layers, output = (pack_all(x, config, parts) for x in (weights["layers"], head(weights)))
    return {**weights, "layers": layers, "head": output}
