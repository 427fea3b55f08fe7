"""The beginning of a model: token ids to vectors."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.dropout import dropout
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.linear.kernels import Int8Table
from jaxformer.functional.placement import Placement
from jaxformer.functional.positions import sinusoidal_positions
from jaxformer.functional.symbolic import nan_if_longer
from jaxformer.functional.taps import Tap
from jaxformer.functional.trees import Weights


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
    that a norm follows. Without a norm 1/√dim suits logits, and the first kernel of a recurrent
    model compensates for it (`models.builders.recurrent`): with 0.02 an LSTM barely starts to
    learn.

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


def embedding_stddev(dim: int, *, is_scaled: bool = False, passes_on: bool = False) -> float:
    """Returns the standard deviation of token vectors.

    0.02 suits vectors that are normalized or added to a residual. Otherwise (`passes_on`), and if
    the vectors are multiplied by √dim, it is 1/√dim, which gives logits of size 1.
    """
    return dim**-0.5 if is_scaled or passes_on else 0.02


@dataclass(frozen=True)
class LearnedPositions:
    """A table of position vectors.

    Attributes:
        length: the number of positions.
        offset: the index of position 0 in the table (2 in RoBERTa and BART).
    """

    length: int
    offset: int = 0

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*rows length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions; NaN outside the table."""
        return x + _look_up(tables["positions"], positions + self.offset, x.dtype, placement)


@dataclass(frozen=True)
class SinusoidalPositions:
    """Sines and cosines of the positions; see `positions.sinusoidal_positions`.

    Attributes:
        halves: whether all sines come first.
    """

    halves: bool = False

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*rows length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions."""
        vectors = sinusoidal_positions(positions, x.shape[-1], halves=self.halves)
        return x + vectors.astype(x.dtype)


@dataclass(frozen=True)
class Embedding:
    """Token vectors, plus positions and types, and their norm.

    Attributes:
        vocab_size: number of token vectors.
        dim: number of features.
        max_length: the most tokens of a row.
        positions: position vectors, or None.
        num_token_types: number of vectors for types of tokens.
        norm: the norm of the sum, or None.
        is_scaled: whether token vectors are multiplied by √dim (Vaswani et al. 2017, §3.4).
        stddev: standard deviation of the token vectors at initialization.
        dtype: dtype of the vectors.
        dropout: dropout rate.
    """

    vocab_size: int
    dim: int
    max_length: int
    positions: LearnedPositions | SinusoidalPositions | None = None
    num_token_types: int = 0
    norm: Norm | None = None
    is_scaled: bool = False
    stddev: float = 0.02
    dtype: str = "float32"
    dropout: float = 0.0

    def init_tables(self, key: PRNGKeyArray) -> Weights:
        """Returns the tables of vectors."""
        learned = self.positions if isinstance(self.positions, LearnedPositions) else None
        return init_embedding(
            key,
            self.vocab_size,
            self.dim,
            stddev=self.stddev,
            learned_positions=0 if learned is None else learned.length + learned.offset,
            token_types=self.num_token_types,
        )

    def __call__(
        self,
        weights: Weights,
        inputs: Inputs,
        positions: Int[Array, "*batch length"],
        dropout_key: PRNGKeyArray | None,
        tap: Tap,
    ) -> Float[Array, "batch length dim"]:
        """Computes the vectors of tokens. Padding is zero before the norm.

        If the number of tokens is a symbol that turns out to be above `max_length`, the vectors
        are NaN.

        Args:
            weights: those of the model, with the tables in "embedding".
            inputs: the tokens.
            positions: their positions.
            dropout_key: a random key, for training.
            tap: see `functional.taps`.
        """
        tables, placement = weights["embedding"], tap.placement
        x = embed_tokens(tables, inputs.tokens, self.dtype, placement)
        if inputs.segments is None:  # documents may be shorter than their row
            x = nan_if_longer(x, x.shape[1], self.max_length)
        if self.is_scaled:
            x = x * jnp.asarray(self.dim**0.5, x.dtype)
        if self.positions is not None:
            x = self.positions.add(tables, x, positions, placement)
        x = add_token_types(tables, x, inputs.token_types, placement)
        x = without_padding(x, inputs.segments)
        x = x if self.norm is None else self.norm(weights["embedding_norm"], x)
        return tap("embedding", dropout(dropout_key, x, self.dropout))
