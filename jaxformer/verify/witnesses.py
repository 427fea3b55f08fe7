"""Witnesses: three independent methods that find which output depends on which input.

Each takes a function of one array and returns the size of the effect for pairs of an output
position and an input position. Exactly 0.0 means no effect, and ∞ stands for NaN. Positions are
numbered in row-major order over the leading axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxformer.models.check import AnyArray
from jaxformer.verify.bounds import REACH, is_float
from jaxformer.verify.taint import Taint, follow

PairTable = Bool[np.ndarray, "outputs inputs"]
Values = Shaped[Array, "..."]


def by_taint(
    function: Callable[..., Array], inputs: AnyArray, num_positions: int, weights: Any = None
) -> Taint:
    """Finds the pairs that a path of computations connects.

    Without `weights`, captured arrays that are entirely 0 are treated as weights with any values.
    Captured arrays with some zeros are treated as constants, since they may be masks. If treating
    them as weights would add pairs, a remark says so.

    Args:
        function: Maps the inputs or, with `weights`, the weights and the inputs to an array.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        weights: A pytree of arrays; None: see above.

    Returns:
        bool [outputs, inputs], remarks and notes.
    """
    if weights is not None:
        closed = jax.make_jaxpr(function)(weights, inputs)
        found = follow(closed, inputs, num_positions, jax.tree.leaves(weights))
        return found._replace(bits=_by_position(found, num_positions))
    closed, captured = jax.make_jaxpr(function)(inputs), _Captured()
    found = follow(closed, inputs, num_positions, varies=captured.zeros)
    pairs, remarks = _by_position(found, num_positions), found.remarks
    if captured.partly:
        other = follow(closed, inputs, num_positions, varies=captured.weights)
        more = _by_position(other, num_positions) & ~pairs
        if more.any():
            remarks += (
                f"captured arrays ({', '.join(captured.partly)}) have zeros that stop {more.sum()} "
                "paths: if they are weights, call with weights=…; if they are a mask, make it bool",
            )
    return Taint(pairs, remarks, found.notes + captured.notes())


class _Captured:
    """Decides which captured arrays of a function may be weights with other values.

    Attributes:
        partly: Descriptions of float arrays with some zeros, as the keys of a dict.
        wholly: Descriptions of float arrays that are entirely 0.
    """

    def __init__(self):
        self.partly, self.wholly = {}, {}

    def zeros(self, array: AnyArray) -> Bool[np.ndarray, "..."]:
        """Returns bool [*shape], true everywhere if the array is entirely 0."""
        zero = _is_zero(array)
        if zero.any():
            name = f"{array.dtype} {list(np.shape(array))}"
            (self.wholly if zero.all() else self.partly)[name] = None
        return np.full(zero.shape, zero.all())

    def weights(self, array: AnyArray) -> Bool[np.ndarray, "..."]:
        """Returns bool [*shape], true where an array with zeros could be a weight, not a mask."""
        zero = _is_zero(array)
        if not zero.any():
            return zero
        return np.abs(np.asarray(array).astype(np.float64)) < REACH

    def notes(self) -> tuple[str, ...]:
        names = ", ".join(self.wholly)
        note = f"captured arrays of zeros ({names}) are taken for weights that may change"
        return (note,) if names else ()


def _is_zero(array: AnyArray) -> Bool[np.ndarray, "..."]:
    """Returns bool [*shape], true at the zeros of a float array."""
    return np.asarray(array) == 0 if is_float(array) else np.zeros(np.shape(array), bool)


def _by_position(found: Taint, num_positions: int) -> PairTable:
    """Returns bool [outputs, inputs]: the union over the features of an output."""
    features = tuple(range(num_positions, found.bits.ndim - 1))
    return found.bits.any(axis=features).reshape(-1, found.bits.shape[-1])


def by_derivative(
    function: Callable[[Array], Array],
    inputs: Float[Array, "..."],
    num_positions: int,
    rows: Int[np.ndarray, " rows"],
) -> Float[np.ndarray, "rows inputs"]:
    """Returns float [rows, inputs]: the largest |∂ output / ∂ feature of the input|, by vjp.

    The features of an output position are summed with nonzero factors, so that each row of the
    Jacobian takes one backward pass.

    Args:
        function: Maps the inputs to an array.
        inputs: A float array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        rows: The output positions to test.
    """

    def one_per_position(x: Float[Array, "..."]) -> Float[Array, " outputs"]:
        y = function(x)
        y = _widened(y.reshape(*y.shape[:num_positions], -1))
        return (y @ jnp.cos(jnp.arange(y.shape[-1], dtype=y.dtype) + 1)).reshape(-1)

    @jax.jit
    def run(x: Float[Array, "..."], rows: Int[Array, " rows"]) -> Float[Array, "rows inputs"]:
        y, pull_back = jax.vjp(one_per_position, x)

        def effect(row: Int[Array, ""]) -> Float[Array, " inputs"]:
            (gradient,) = pull_back(jnp.zeros_like(y).at[row].set(1.0))
            return _largest(gradient.reshape(*x.shape[:num_positions], -1), num_positions)

        # One by one: a batch of backward passes is the wrong program on CPU of docs/hazards.md, and
        # takes as long.
        return jax.lax.map(effect, rows)

    return np.asarray(run(inputs, jnp.asarray(rows)))


def by_change(
    function: Callable[[Array], Array],
    inputs: AnyArray,
    num_positions: int,
    columns: Int[np.ndarray, " columns"],
    others: AnyArray,
) -> Float[np.ndarray, "outputs columns"]:
    """Returns float [outputs, columns]: the change of an output when one input is replaced.

    Two results that differ get at least the smallest normal number, even if their difference
    rounds to 0.

    Args:
        function: Maps the inputs to an array.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        columns: The input positions to test.
        others: The replacements, with the shape of the inputs.
    """
    shape = inputs.shape[:num_positions]
    features = (1,) * (inputs.ndim - num_positions)

    @jax.jit
    def run(
        x: Values, others: Values, columns: Int[Array, " columns"]
    ) -> Float[Array, "columns outputs"]:
        # A result is compared one step after the step that computes it: within one step, a compiler
        # may compute it twice, with different rounding.
        def step(
            results: tuple[Values, Values], columns: Int[Array, "2"]
        ) -> tuple[tuple[Values, Values], Float[Array, " outputs"]]:
            (y, z), (column, before) = results, columns
            y = jnp.where(before < 0, z, y)
            same = (y == z) | ((y != y) & (z != z))
            by = jnp.abs(_widened(z) - _widened(y))
            by = jnp.where(same, 0.0, jnp.maximum(by, jnp.finfo(by.dtype).tiny))
            here = jnp.arange(np.prod(shape), dtype=jnp.int32) == column
            z = function(jnp.where(here.reshape(*shape, *features), others, x))
            return (y, z), _largest(by.reshape(*y.shape[:num_positions], -1), num_positions)

        # The column −1 replaces nothing and gives the reference outputs. They must come from the
        # same compiled program, because another one may round differently.
        shapes = jax.eval_shape(function, x)
        empty = jnp.zeros(shapes.shape, shapes.dtype)
        pairs = jnp.stack(
            [jnp.append(-1, jnp.append(columns, 0)), jnp.append(0, jnp.append(-1, columns))], axis=1
        )
        return jax.lax.scan(step, (empty, empty), pairs)[1][2:]

    return np.asarray(run(inputs, others, jnp.asarray(columns))).T


def _largest(x: Values, num_positions: int) -> Float[Array, " positions"]:
    """Returns [positions]: the largest |feature|, where NaN counts as ∞."""
    sizes = jnp.where(jnp.isnan(x), jnp.inf, _widened(jnp.abs(x)))
    return sizes.max(axis=range(num_positions, x.ndim), initial=0.0).reshape(-1)


def _widened(x: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the array in float32, or in float64 if it has this dtype."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
