"""Dependency matrices: which output position depends on which input position.

    found = dependency_matrix(function, inputs)       # bool [outputs, inputs], and effect sizes
    compare(found, rules.causal(length))              # missing and unexpected dependencies
    assert_dependencies(function, inputs, rules.causal(length))       # the same, in a test

`function` is any function that JAX can trace. The function maps tokens (int) or embeddings (float,
features last) to an array. Both the argument and the result have positions as leading axes:
[length, …] or [batch, length, …].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import TraceContextError
from jaxtyping import Array, ArrayLike, Shaped

from jaxformer.models.config.check import whole_number
from jaxformer.verify.bounds import is_float
from jaxformer.verify.witnesses import by_change, by_derivative, by_taint

WITNESSES = ("taint", "derivative", "change")
NO_PATH = "taint analysis missed a dependency with a measured effect, so a taint rule is wrong"
Shape = tuple[int, ...]


class Disagreement(NamedTuple):
    """A pair of positions on which two methods disagree, and a possible reason."""

    output: tuple[int, ...]
    input: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Dependency:
    """A dependency matrix, with the measured effects and remarks.

    Attributes:
        matrix: bool [*output positions, *input positions], True where at least one method found a
            dependency.
        effects: Float array of the same shape: the largest effect (derivative or change) of each
            input on each output. NaN for pairs that neither "derivative" nor "change" tested.
        witnesses: The number of pairs that each method tested, by the method's name.
        disagreements: The pairs on which the methods disagree.
        remarks: Reasons why the matrix may be wrong, such as a primitive without a taint rule.
        notes: Assumptions of the analysis, for example that a finite number acts as a mask.
    """

    matrix: np.ndarray
    effects: np.ndarray
    witnesses: dict[str, int]
    disagreements: tuple[Disagreement, ...] = ()
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def dependency_matrix(
    function: Callable[..., Array],
    inputs: ArrayLike,
    *,
    weights: Any = None,
    witnesses: tuple[str, ...] | list[str] | None = None,
    sample: int | None = None,
    others: ArrayLike | None = None,
    seed: int = 0,
    atol: float = 0.0,
) -> Dependency:
    """Finds which output depends on which input, with up to three independent methods.

    - "taint" follows all inputs through the function's jaxpr and finds every path. Only an exact 0
      or a mask stops a path.
    - "derivative" computes the Jacobian.
    - "change" replaces one input at a time and compares the outputs bit by bit.

    "derivative" and "change" evaluate the function at the given inputs. These two methods find only
    real dependencies, but may miss a dependency whose effect is 0 at these inputs or is rounded
    away.

    By default every nonzero effect is a dependency. Some functions are independent of an input
    except for rounding errors. An example is a causal convolution by a padded FFT, in which terms
    cancel. To test such a function, pass `atol` and `witnesses=("derivative", "change")`. Taint
    analysis does not measure effects, so `atol` does not remove the paths that it finds.

    Args:
        function: Maps `inputs` to one array. With `weights`, the call is
            `function(weights, inputs)`.
        inputs: int [*positions] or float [*positions, features]. The positions are [length] or
            [batch, length].
        weights: A pytree of arrays. If given, taint analysis finds the paths that exist for at
            least one value of the weights, and treats the arrays in the function's closure as
            constants. If None, arrays in the closure that are entirely 0 are treated as weights,
            because training changes zero-initialised weights.
        witnesses: The names of the methods to use. Defaults to all; "derivative" is skipped for
            integer inputs and for functions without a derivative.
        sample: The number of inputs that "change" tests and of outputs that "derivative" tests; all
            if None. The first of the methods in `witnesses` always tests all pairs.
        others: The replacements of the inputs, with the same shape. If None, the replacements are
            drawn with `seed`; token ids are drawn from 0, 1 and the ids that occur in `inputs`.
        seed: Seed of the random choices for `sample` and `others`.
        atol: Derivatives and changes up to this size are taken as rounding errors. Real
            dependencies with an effect up to this size are not found.

    Returns:
        The dependency matrix. `atol` does not change the `effects`.

    Raises:
        ValueError: An argument is invalid, or the function changes an nnx object.
    """
    inputs = _array(inputs)
    is_ids = not is_float(inputs)
    by_default, witnesses = witnesses is None, _checked_witnesses(witnesses, is_ids)
    sample = None if sample is None else whole_number("sample", sample, 1)
    seed = whole_number("seed", seed, 0)
    if not (isinstance(atol, Real) and 0 <= atol < np.inf):
        raise ValueError(f"atol is {atol!r}; it must be a finite number of at least 0")
    if others is not None and np.shape(others) != inputs.shape:
        raise ValueError(
            f"others have shape {np.shape(others)}; they must have the shape of inputs, "
            f"{inputs.shape}"
        )
    num_positions = inputs.ndim if is_ids else inputs.ndim - 1
    applied = function if weights is None else partial(function, weights)
    before, after = _positions(applied, inputs, num_positions)
    # The caller may have drawn the inputs with `default_rng(seed)`, so use another generator.
    rng = np.random.default_rng((seed, 1))
    size = int(np.prod(after)), int(np.prod(before))
    others = _others(inputs, rng) if others is None else jnp.asarray(others, inputs.dtype)
    unchanged = (others == inputs).reshape(size[1], -1).all(axis=1)
    if unchanged.any():
        place = place_name(np.unravel_index(int(unchanged.argmax()), before))
        raise ValueError(
            f"others equal inputs at position {place}; they must differ at every position"
        )
    effects, num_pairs, remarks, notes = {}, {}, (), ()
    for witness in witnesses:
        whole = np.full(size, np.nan)
        axis = 0 if witness == "derivative" else 1
        tested = np.arange(size[axis])
        if sample is not None and effects and witness != "taint" and sample < size[axis]:
            tested = np.sort(rng.choice(size[axis], sample, replace=False))
        if witness == "taint":
            whole[:], doubts, notes = by_taint(function, inputs, num_positions, weights)
            remarks += doubts
        elif witness == "derivative":
            try:
                whole[tested] = by_derivative(applied, inputs, num_positions, tested)
            except Exception as error:
                # JAX raises exceptions of many types if it cannot differentiate a while loop, a
                # callback or a reference.
                if not by_default:
                    raise
                remarks += (f"the function has no derivative: {str(error).splitlines()[0]}",)
                continue
        else:
            whole[:, tested] = by_change(applied, inputs, num_positions, tested, others)
        effects[witness], num_pairs[witness] = whole, len(tested) * size[1 - axis]
    measured = [effect for witness, effect in effects.items() if witness != "taint"]
    largest = np.fmax.reduce([np.full(size, np.nan), *measured])
    seen = {
        witness: effect if witness == "taint" else np.where(effect <= atol, 0.0, effect)
        for witness, effect in effects.items()
    }
    matrix = np.any([effect > 0 for effect in seen.values()], axis=0)
    matrix, largest = (x.reshape(*after, *before) for x in (matrix, largest))
    disagreements = tuple(_disagreements(seen, after, before))
    return Dependency(matrix, largest, num_pairs, disagreements, remarks, notes)


def _array(inputs: ArrayLike) -> Array:
    try:
        return jnp.asarray(inputs)
    except TypeError as error:
        raise ValueError(f"inputs have type {type(inputs).__name__}; pass one array") from error


def _checked_witnesses(
    witnesses: tuple[str, ...] | list[str] | None, is_ids: bool
) -> tuple[str, ...]:
    names = ", ".join(WITNESSES)
    if isinstance(witnesses, str) or not isinstance(witnesses, tuple | list | None):
        raise ValueError(f"witnesses is {witnesses!r}; it must be a tuple of {names}")
    possible = [name for name in WITNESSES if not (is_ids and name == "derivative")]
    chosen = tuple(possible if witnesses is None else witnesses)
    for name in chosen:
        if name not in WITNESSES:
            raise ValueError(f"witness is {name!r}; it must be one of {names}")
        if name not in possible:
            raise ValueError('witness "derivative" needs float inputs, but inputs are integers')
    if not chosen:
        raise ValueError(f"witnesses is empty; name at least one of {', '.join(possible)}")
    return chosen


def _positions(
    function: Callable[[Array], Array], inputs: Array, num_positions: int
) -> tuple[Shape, Shape]:
    """Returns (shape of the input positions, shape of the output positions)."""
    if not num_positions or not inputs.size:
        raise ValueError(
            f"inputs are {inputs.dtype} {inputs.shape}; they must be token ids, [length] or "
            "[batch, length], or floats, [length, features] or [batch, length, features]"
        )
    try:
        output = jax.eval_shape(function, inputs)
    except TraceContextError as error:
        # Dropout updates a counter, for example, and BatchNorm updates its statistics.
        raise ValueError(
            f"the function changes an nnx object while it is traced ({error}). Call model.eval() "
            "first, which turns off dropout and the statistics of BatchNorm. Call a Linen model in "
            "ToNNX with rngs=nnx.Rngs()"
        ) from error
    if not hasattr(output, "shape") or len(output.shape) < num_positions:
        raise ValueError(
            f"the function returns {output}; it must return one array with at least "
            f"{num_positions} axes, the first of which are positions"
        )
    return inputs.shape[:num_positions], output.shape[:num_positions]


def _others(inputs: Shaped[Array, "*shape"], rng: np.random.Generator) -> Shaped[Array, "*shape"]:
    """Draws a replacement for the value of each position."""
    if is_float(inputs):
        size = max(float(jnp.std(inputs.astype(jnp.float32))), 1.0)
        return jnp.asarray(size * rng.normal(size=inputs.shape), inputs.dtype)
    # Adding 0 and 1 ensures that there are at least two different ids.
    ids = np.unique(np.append(np.asarray(inputs), [0, 1]))
    at = np.searchsorted(ids, np.asarray(inputs))
    drawn = ids[(at + rng.integers(1, len(ids), inputs.shape)) % len(ids)]
    return jnp.asarray(drawn, inputs.dtype)


_WHY = {
    "derivative": "another method found a dependency, but the derivative is 0 at this point: terms "
    "cancel, are rounded to 0 or enter a function that is constant there (a ReLU below 0)",
    "change": "another method found a dependency, but a change of this input does not change the "
    "output: the change is rounded to 0, or the function is constant near this input",
    "taint": NO_PATH,
}
_INFINITE = "taint analysis ignores products with an exact 0, but 0 times infinity is NaN"


def _disagreements(
    effects: Mapping[str, Shaped[np.ndarray, "outputs inputs"]], after: Shape, before: Shape
) -> Iterator[Disagreement]:
    """Yields the pairs for which one method found an effect and another method did not."""
    for witness, seen in effects.items():
        others = [other for name, other in effects.items() if name != witness]
        largest = np.fmax.reduce([np.zeros_like(seen), *others])
        for output, input in np.argwhere((seen == 0) & (largest > 0)):
            is_infinite = witness == "taint" and np.isinf(largest[output, input])
            why = _INFINITE if is_infinite else _WHY[witness]
            places = np.unravel_index(output, after), np.unravel_index(input, before)
            yield Disagreement(*(tuple(map(int, place)) for place in places), why=why)


def place_name(place: tuple[int | np.integer, ...]) -> str:
    """Returns a position as text, with the batch element if there is a batch axis."""
    return str(place[0]) if len(place) == 1 else f"{place[-1]} of batch element {place[0]}"
