"""Three independent methods that find which output of a function depends on which input.

Each method takes a function of one array. The method returns the size of the effect for pairs of an
output position and an input position. Exactly 0.0 means that no effect was found, and NaN becomes
∞. Positions are numbered in row-major order over the leading axes.
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
    """Finds paths from inputs to outputs in the function's jaxpr.

    Without `weights`, arrays in the function's closure that are entirely 0 are treated as weights
    with any values. Arrays in the closure with some zeros are treated as constants, because they
    may be masks. If treating these arrays as weights adds dependencies, a remark states the number
    of additional dependencies.

    Args:
        function: Called with the inputs or, if `weights` are given, with the weights and the
            inputs.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        weights: A pytree of arrays, the first argument of `function`; None if `function` has only
            one argument.

    Returns:
        A `Taint` whose bits are bool [outputs, inputs].
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
                f"arrays in the function's closure ({', '.join(captured.partly)}) contain zeros; "
                f"nonzero values would add {more.sum()} dependencies. If these arrays are weights, "
                "pass them as weights=…. If they are masks, convert them to bool",
            )
    return Taint(pairs, remarks, found.notes + captured.notes())


class _Captured:
    """Decides which arrays in a function's closure are treated as weights.

    Attributes:
        partly: A dict whose keys describe the float arrays with some zeros.
        wholly: A dict whose keys describe the float arrays that are entirely 0.
    """

    def __init__(self):
        self.partly, self.wholly = {}, {}

    def zeros(self, array: AnyArray) -> Bool[np.ndarray, "..."]:
        """Returns bool [*shape]: True everywhere if the array is entirely 0, else False."""
        zero = _is_zero(array)
        if zero.any():
            name = f"{array.dtype} {list(np.shape(array))}"
            (self.wholly if zero.all() else self.partly)[name] = None
        return np.full(zero.shape, zero.all())

    def weights(self, array: AnyArray) -> Bool[np.ndarray, "..."]:
        """Returns bool [*shape]: True for elements that may be weights.

        The result is False for arrays without zeros: only a zero ends a path, so treating these
        arrays as weights would not add paths. Elements with an absolute value of at least `REACH`
        are treated as masks.
        """
        zero = _is_zero(array)
        if not zero.any():
            return zero
        return np.abs(np.asarray(array).astype(np.float64)) < REACH

    def notes(self) -> tuple[str, ...]:
        names = ", ".join(self.wholly)
        note = (
            f"arrays of zeros in the function's closure ({names}) are treated as weights, which "
            "may be trained"
        )
        return (note,) if names else ()


def _is_zero(array: AnyArray) -> Bool[np.ndarray, "..."]:
    """Returns bool [*shape]: True at the zeros of a float array, False for other dtypes."""
    return np.asarray(array) == 0 if is_float(array) else np.zeros(np.shape(array), bool)


def _by_position(found: Taint, num_positions: int) -> PairTable:
    """Returns bool [outputs, inputs]: the union of the bits over the features of each output."""
    features = tuple(range(num_positions, found.bits.ndim - 1))
    return found.bits.any(axis=features).reshape(-1, found.bits.shape[-1])


def by_derivative(
    function: Callable[[Array], Array],
    inputs: Float[Array, "..."],
    num_positions: int,
    rows: Int[np.ndarray, " rows"],
) -> Float[np.ndarray, "rows inputs"]:
    """Returns float [rows, inputs]: the largest |∂ output / ∂ input feature|.

    The features of each output position are summed with nonzero factors. Each row of the Jacobian
    therefore needs only one backward pass.

    Args:
        function: Maps the inputs to an array.
        inputs: A float array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        rows: The output positions to test, which are the rows of the Jacobian.
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

        # `map` runs one backward pass at a time. XLA miscompiles batched backward passes on CPUs
        # (docs/hazards.md), and batching is not faster.
        return jax.lax.map(effect, rows)

    return np.asarray(run(inputs, jnp.asarray(rows)))


def by_change(
    function: Callable[[Array], Array],
    inputs: AnyArray,
    num_positions: int,
    columns: Int[np.ndarray, " columns"],
    others: AnyArray,
) -> Float[np.ndarray, "outputs columns"]:
    """Returns float [outputs, tested inputs]: the change of each output if one input is replaced.

    If an output changes, the reported change is at least the smallest normal number, even if the
    difference rounds to 0.

    Args:
        function: Maps the inputs to an array.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        columns: The input positions to test.
        others: The replacements, with the same shape as the inputs.
    """
    shape = inputs.shape[:num_positions]
    features = (1,) * (inputs.ndim - num_positions)

    @jax.jit
    def run(
        x: Values, others: Values, columns: Int[Array, " columns"]
    ) -> Float[Array, "columns outputs"]:
        # Each scan step computes one result, and compares the previous step's result with the
        # reference. If a step compared its own result, the compiler could compute the result twice,
        # with different rounding.
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

        # For the column −1, the scan replaces no input and computes the reference. Another compiled
        # program might round the reference differently.
        shapes = jax.eval_shape(function, x)
        empty = jnp.zeros(shapes.shape, shapes.dtype)
        pairs = jnp.stack(
            [jnp.append(-1, jnp.append(columns, 0)), jnp.append(0, jnp.append(-1, columns))], axis=1
        )
        return jax.lax.scan(step, (empty, empty), pairs)[1][2:]

    return np.asarray(run(inputs, others, jnp.asarray(columns))).T


def _largest(x: Values, num_positions: int) -> Float[Array, " positions"]:
    """Returns the largest |feature| of each position, with NaN as ∞."""
    sizes = jnp.where(jnp.isnan(x), jnp.inf, _widened(jnp.abs(x)))
    return sizes.max(axis=range(num_positions, x.ndim), initial=0.0).reshape(-1)


def _widened(x: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Converts the array to float32, unless it has dtype float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
