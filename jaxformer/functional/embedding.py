"""Embeddings, which convert token ids or float features to vectors."""

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.dropout import dropout
from jaxformer.functional.hooks import HookPoints
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.linear.kernels import Int8Table
from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.positions import sinusoidal_positions
from jaxformer.functional.symbolic import nan_if_longer
from jaxformer.functional.trees import Weights


def embed_tokens(
    weights: Weights,
    tokens: Shaped[Array, "batch length *dim"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Looks up the token vectors [*batch, length, dim] of ids; float inputs are only cast.

    The vector of an id outside the table is NaN.
    """
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        return _look_up(weights["tokens"], tokens, dtype, placement)
    return tokens.astype(dtype)


def add_token_types(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    token_type_ids: Int[Array, "batch length"] | None,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Adds the vector of each token's type, if the weights have token types."""
    if "token_types" not in weights:
        return x
    if token_type_ids is None:
        return x + weights["token_types"][0].astype(x.dtype)
    return x + _look_up(weights["token_types"], token_type_ids, x.dtype, placement)


def _look_up(
    table: Float[Array, "words dim"] | Int8Table,
    index: Int[Array, "*batch"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "*batch dim"]:
    in_table = (index >= 0) & (index < table.shape[0])
    # `jnp.take` would count a negative index from the end of the table.
    index = jnp.where(in_table, index, table.shape[0])

    def take(index: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
        if isinstance(table, Int8Table):
            return table.take(index)
        return jnp.take(table, index, axis=0, mode="fill", fill_value=jnp.nan)

    return placement.look_up(take, index, table.shape[0], dtype)


def _check_positions(x: Float[Array, "*batch length dim"], positions: Any) -> None:
    """Raises ValueError if position vectors do not fit x."""
    if positions is None or callable(positions):
        return
    length, dim = x.shape[-2:]
    shape = getattr(positions, "shape", None)
    if shape is None:
        raise TypeError(
            f"positions is a {type(positions).__name__}; it must be an array or a function"
        )
    if len(shape) != 2 or shape[0] < length or shape[1] != dim:
        raise ValueError(
            f"positions has shape {shape}; it must be [at least {length}, {dim}] for x {x.shape}"
        )


@checks_arguments()
def embed(
    table: Float[Array, "words dim"], tokens: Int[Array, "*batch length"]
) -> Float[Array, "*batch length dim"]:
    """Looks up the vectors e_i of token ids; the vector of an id outside the table is NaN."""
    return _look_up(table, jnp.asarray(tokens), table.dtype, OneDevice())


@checks_arguments(_check_positions)
def encode_positions(
    x: Float[Array, "*batch length dim"],
    positions: Float[Array, "..."]
    | Callable[[Int[Array, " length"], int], Float[Array, "length dim"]]
    | None = None,
) -> Float[Array, "*batch length dim"]:
    """Adds position vectors to token vectors: e_i + p_i at each position i.

    Args:
        x: the token vectors e.
        positions: the position vectors p [at least length, dim]; or a function of the positions
            and `dim` that returns them; by default `sinusoidal_positions`.

    Raises:
        ValueError: The position vectors do not fit x.

    Reference:
        Notes, lecture 10 §5.
    """
    length, dim = x.shape[-2:]
    if positions is None:
        positions = sinusoidal_positions
    if callable(positions):
        positions = positions(jnp.arange(length, dtype=jnp.int32), dim)
        _check_positions(x, positions)
    return x + positions[:length].astype(x.dtype)


def without_padding(
    x: Shaped[Array, "batch length dim"], segment_ids: Int[Array, "batch length"] | None
) -> Shaped[Array, "batch length dim"]:
    """Zeroes x at padding (segment id 0), so that padding does not influence any output."""
    return x if segment_ids is None else jnp.where((segment_ids != 0)[..., None], x, 0)


def embedding_stddev(dim: int, *, is_scaled: bool = False, passes_on: bool = False) -> float:
    """Returns the initial standard deviation of input vectors.

    The standard deviation is 1/√dim for vectors that are multiplied by √dim (`is_scaled`), and in
    models with neither a residual stream nor norms (`passes_on`). Otherwise it is 0.02. With
    1/√dim, logits have a magnitude of about 1.
    """
    return dim**-0.5 if is_scaled or passes_on else 0.02


@dataclass(frozen=True)
class LearnedPositions:
    """Learned position vectors.

    Attributes:
        length: the number of positions.
        offset: the index of position 0 in the table (2 in RoBERTa and BART).
    """

    is_table: ClassVar[bool] = True

    length: int
    offset: int = 0

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*position_batch length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions; positions outside the table give NaN."""
        return x + _look_up(tables["positions"], positions + self.offset, x.dtype, placement)


@dataclass(frozen=True)
class SinusoidalPositions:
    """Sinusoidal position vectors; see `positions.sinusoidal_positions`.

    Attributes:
        halves: whether all sines precede all cosines.
    """

    is_table: ClassVar[bool] = False

    halves: bool = False

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*position_batch length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions."""
        vectors = sinusoidal_positions(positions, x.shape[-1], halves=self.halves)
        return x + vectors.astype(x.dtype)


@dataclass(frozen=True)
class TablePositions:
    """Position vectors given as an array.

    Attributes:
        length: the number of positions.
        dim: the number of features of a vector.
        numbers: the vectors, float32 [length, dim] in base 64.
    """

    is_table: ClassVar[bool] = True

    length: int
    dim: int
    numbers: str

    @classmethod
    def of(cls, vectors: Float[Array | np.ndarray, "..."]) -> "TablePositions":
        """Returns the position vectors of an array [length, dim].

        Raises:
            ValueError: The array does not have two axes.
        """
        if len(vectors.shape) != 2:
            raise ValueError(
                f"positions has shape {tuple(vectors.shape)}; it must be [max_length, embed_dim]"
            )
        numbers = np.asarray(vectors, "<f4")
        length, dim = numbers.shape
        return cls(length, dim, b64encode(numbers.tobytes()).decode())

    def vectors(self) -> Float[np.ndarray, "length dim"]:
        """Returns the array."""
        return np.frombuffer(b64decode(self.numbers), "<f4").reshape(self.length, self.dim)

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*position_batch length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions; positions outside the array give NaN."""
        return x + _look_up(jnp.asarray(self.vectors()), positions, x.dtype, placement)


@dataclass(frozen=True)
class FunctionPositions:
    """Position vectors given as a function.

    Attributes:
        compute: function of the positions, int [tokens], and of the number of features `dim`. It
            returns the position vectors, float [tokens, dim].
    """

    is_table: ClassVar[bool] = False

    compute: Callable[[Any, int], Any]

    def add(
        self,
        tables: Weights,
        x: Float[Array, "batch length dim"],
        positions: Int[Array, "*position_batch length"],
        placement: Placement,
    ) -> Float[Array, "batch length dim"]:
        """Adds the vectors of the positions.

        Raises:
            ValueError: The function returns an array of another shape.
        """
        shape = (*positions.shape, x.shape[-1])
        vectors = self.compute(positions.reshape(-1), x.shape[-1])
        if jnp.shape(vectors) != (positions.size, x.shape[-1]):
            raise ValueError(
                f"positions returns an array of shape {jnp.shape(vectors)}; for {positions.size} "
                f"positions, it must be {(positions.size, x.shape[-1])}"
            )
        return x + vectors.reshape(shape).astype(x.dtype)


# `is_table` says whether only a limited number of positions have vectors.
PositionVectors = LearnedPositions | SinusoidalPositions | TablePositions | FunctionPositions


def as_positions(positions: Any) -> TablePositions | FunctionPositions | None:
    """Converts the positions of a model to position vectors: an array, or a function.

    Raises:
        ValueError: The positions have another type.
    """
    if positions is None or isinstance(positions, TablePositions | FunctionPositions):
        return positions
    if isinstance(positions, jax.Array | np.ndarray):
        return TablePositions.of(positions)
    if callable(positions) and not is_dataclass(positions):
        return FunctionPositions(positions)
    raise ValueError(
        f"positions is a {type(positions).__name__}; it must be an array [max_length, embed_dim], "
        "or a function of the positions and of embed_dim that returns such an array"
    )


@dataclass(frozen=True)
class InputVectors(ABC):
    """Base class of layers that convert the inputs of a model to vectors.

    Subclasses are frozen dataclasses with hashable fields. `Embedding` adds positions, and applies
    the norm and dropout.
    """

    @abstractmethod
    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns initial weights.

        Args:
            key: a random key.
            dim: number of features of a vector.
            stddev: standard deviation of the features of the vectors.
        """

    @abstractmethod
    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """Computes the vectors of `inputs.tokens` in `dtype`; padding may have any vector."""

    def units(self) -> tuple[int, ...]:
        """Returns the sizes of axes that tensor parallelism splits, such as the vocabulary."""
        return ()


@dataclass(frozen=True)
class TokenVectors(InputVectors):
    """A table of vectors, one for each token id.

    Attributes:
        vocab_size: number of token ids.
    """

    vocab_size: int

    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns initial token vectors from N(0, stddev²).

        A stddev of 0.02 (GPT-2) suits models with norms. Without a norm, a stddev of 1/√dim gives
        logits with a magnitude of about 1. With a stddev of 0.02, an LSTM barely starts to learn.
        `models.builders.recurrent` therefore uses 1/√dim, and enlarges the first layer's input
        kernel.
        """
        return {"tokens": stddev * jax.random.normal(key, (self.vocab_size, dim), jnp.float32)}

    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """See `embed_tokens`."""
        return embed_tokens(weights, inputs.tokens, dtype, placement)

    def units(self) -> tuple[int, ...]:
        """Returns the vocabulary size."""
        return (self.vocab_size,)


@dataclass(frozen=True)
class FeatureVectors(InputVectors):
    """A linear layer for float features, such as audio frames or image patches.

    Attributes:
        num_features: number of input features per position.
    """

    num_features: int

    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns W from N(0, stddev² / num_features), and b = 0.

        Input features of variance 1 give vectors with standard deviation `stddev`.
        """
        return init_linear(key, self.num_features, dim, stddev=stddev / self.num_features**0.5)

    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """Computes x W + b. Padding in x is set to 0, because W's gradient contains x."""
        return linear(weights, without_padding(inputs.tokens, inputs.segment_ids).astype(dtype))


@dataclass(frozen=True)
class Embedding:
    """Embedding of a model: input vectors plus position and type vectors, then a norm.

    Attributes:
        vectors: the layer from inputs to vectors.
        dim: number of features of a vector.
        max_length: maximum number of tokens per sequence.
        positions: position vectors, or None.
        num_token_types: number of token types.
        norm: the norm of the sum, or None.
        is_scaled: whether the vectors are multiplied by √dim (Vaswani et al. 2017, §3.4).
        stddev: standard deviation of the vectors at initialization.
        dtype: dtype of the vectors.
        dropout: dropout rate.
    """

    vectors: InputVectors
    dim: int
    max_length: int
    positions: PositionVectors | None = None
    num_token_types: int = 0
    norm: Norm | None = None
    is_scaled: bool = False
    stddev: float = 0.02
    dtype: str = "float32"
    dropout: float = 0.0

    def init(self, key: PRNGKeyArray) -> Weights:
        """Returns the initial weights, with position and type vectors from N(0, 0.02²)."""
        key, positions = jax.random.split(key)
        weights = dict(self.vectors.init(key, self.dim, self.stddev))
        if isinstance(self.positions, LearnedPositions):
            size = self.positions.length + self.positions.offset, self.dim
            weights["positions"] = 0.02 * jax.random.normal(positions, size, jnp.float32)
        if self.num_token_types:
            size, types = (self.num_token_types, self.dim), jax.random.fold_in(positions, 1)
            weights["token_types"] = 0.02 * jax.random.normal(types, size, jnp.float32)
        return weights

    def __call__(
        self,
        weights: Weights,
        inputs: Inputs,
        positions: Int[Array, "*batch length"],
        dropout_key: PRNGKeyArray | None,
        hook: HookPoints,
    ) -> Float[Array, "batch length dim"]:
        """Computes the vectors of the inputs. Before the norm, vectors at padding are set to 0.

        If the length is symbolic and exceeds `max_length` at run time, the vectors are NaN.

        Args:
            weights: the weights of the model, with the embedding in "embedding".
            inputs: the tokens or features.
            positions: the positions of the tokens.
            dropout_key: a random key, for training.
            hook: see `functional.hooks`.
        """
        tables, placement = weights["embedding"], hook.placement
        x = self.vectors(tables, inputs, self.dtype, placement)
        # With packed documents, the limit applies to each document and not to the sequence.
        if inputs.segment_ids is None:
            x = nan_if_longer(x, x.shape[1], self.max_length)
        if self.is_scaled:
            x = x * jnp.asarray(self.dim**0.5, x.dtype)
        if self.positions is not None:
            x = self.positions.add(tables, x, positions, placement)
        x = add_token_types(tables, x, inputs.token_type_ids, placement)
        x = without_padding(x, inputs.segment_ids)
        x = x if self.norm is None else self.norm(weights["embedding_norm"], x)
        return hook("embedding", dropout(dropout_key, x, self.dropout))
