"""Position vectors, which are added to token vectors: learned, sinusoidal, or given by a user."""

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.placement import Placement
from jaxformer.functional.positions import sinusoidal_positions
from jaxformer.functional.tables import look_up
from jaxformer.functional.trees import Weights
from jaxformer.terminal import kind_of


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
        """Adds the vectors of the positions, which are NaN for positions outside the table."""
        return x + look_up(tables["positions"], positions + self.offset, x.dtype, placement)


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
        """Converts an array [length, dim] to `TablePositions`.

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
        """Adds the vectors of the positions, which are NaN for positions outside the array."""
        return x + look_up(jnp.asarray(self.vectors()), positions, x.dtype, placement)


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
        vectors = _call_function(self.compute, positions.reshape(-1), x.shape[-1])
        return x + vectors.reshape(*positions.shape, -1).astype(x.dtype)


def _call_function(
    function: Callable[[Any, int], Any], positions: Int[Array, " tokens"], dim: int
) -> Shaped[Array, "tokens dim"]:
    """Calls a user's function of positions, and checks the shape of its result."""
    vectors = function(positions, dim)
    if jnp.shape(vectors) != (positions.size, dim):
        raise ValueError(
            f"positions returns an array of shape {jnp.shape(vectors)}; for {positions.size} "
            f"positions, it must be {(positions.size, dim)}"
        )
    return vectors


# `is_table` is True if only a limited number of positions have vectors.
PositionVectors = LearnedPositions | SinusoidalPositions | TablePositions | FunctionPositions


def as_positions(positions: Any) -> TablePositions | FunctionPositions | None:
    """Converts an array or a function of positions to the position vectors of a model.

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
        f"positions is {kind_of(positions)}; it must be an array [max_length, embed_dim], "
        "or a function of the positions and of embed_dim that returns such an array"
    )


def _check_positions(x: Float[Array, "*batch length dim"], positions: Any) -> None:
    """Raises ValueError if position vectors do not fit x."""
    if positions is None or callable(positions):
        return
    length, dim = x.shape[-2:]
    shape = getattr(positions, "shape", None)
    if shape is None:
        raise TypeError(f"positions is {kind_of(positions)}; it must be an array or a function")
    if len(shape) != 2 or shape[0] < length or shape[1] != dim:
        raise ValueError(
            f"positions has shape {shape}; it must be [at least {length}, {dim}] for x {x.shape}"
        )


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
        positions: the position vectors p [at least length, dim], or a function of the positions
            and `dim` that returns such vectors. The default is `sinusoidal_positions`.

    Raises:
        ValueError: The position vectors do not fit x.

    Reference:
        Notes, lecture 10 §5.
    """
    length, dim = x.shape[-2:]
    if positions is None or callable(positions):
        function = positions or sinusoidal_positions
        positions = _call_function(function, jnp.arange(length, dtype=jnp.int32), dim)
    return x + positions[:length].astype(x.dtype)
