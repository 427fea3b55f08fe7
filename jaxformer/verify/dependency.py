"""Dependency matrices: which output position depends on which input position.

    found = dependency_matrix(function, inputs)       # bool [outputs, inputs], and effect sizes
    compare(found, rules.causal(length))              # missing and spurious edges
    assert_dependencies(function, inputs, rules.causal(length))       # the same, in a test

`function` is any function that JAX can trace. It maps tokens (int) or embeddings (float, features
last) to an array whose leading axes are positions too: [length, …] or [batch, length, …].
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
NO_PATH = "an effect was seen where taint followed no path: one of its rules is wrong"
Shape = tuple[int, ...]


class Disagreement(NamedTuple):
    """A pair of positions on which two witnesses disagree, and a possible reason."""

    output: tuple[int, ...]
    input: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Dependency:
    """A dependency matrix, with the effects and doubts behind it.

    Attributes:
        matrix: bool [*output positions, *input positions], true where any witness saw an effect.
        effects: Float of the same shape, the largest derivative or change. NaN where neither of
            these witnesses tested the pair.
        witnesses: The number of pairs that each witness tested.
        disagreements: The pairs on which the witnesses disagree.
        remarks: Doubts about the matrix, such as a primitive for which taint has no rule.
        notes: Assumptions, such as which finite numbers count as masks.
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
    """Finds which output depends on which input, with up to three independent methods (witnesses).

    - "taint" follows all inputs through the function's jaxpr and finds every path. Only an exact 0
      or a mask stops a path.
    - "derivative" computes the Jacobian.
    - "change" replaces one input at a time and compares the outputs bit by bit.

    The last two test the function at one point. They never see a path that does not exist, but they
    may miss a path whose effect is 0 at this point or is rounded away.

    By default every effect that is not exactly 0 is a dependency. Some functions are independent of
    an input only up to rounding, such as a causal convolution by a padded FFT, whose terms cancel.
    For such a function pass `atol` and `witnesses=("derivative", "change")`. Taint does not measure
    effects, so `atol` does not remove the paths that it finds.

    Args:
        function: Maps `inputs` to one array. With `weights` it is called as
            `function(weights, inputs)`.
        inputs: int [*positions] or float [*positions, features]. The positions are [length] or
            [batch, length].
        weights: A pytree of arrays. Taint then finds the paths that exist for any values of them,
            and treats captured arrays as constants. None: captured arrays that are entirely 0 may
            get other values, as zero-initialised weights do.
        witnesses: Names of witnesses; None: all, but "derivative" only for inputs that have one.
        sample: The number of inputs that "change" tests and of outputs that "derivative" tests. It
            does not limit the first witness. None: all.
        others: The replacements of the inputs, with their shape. None: drawn with `seed`; token ids
            are drawn from the ids that occur, 0 and 1.
        seed: Seed for `sample` and `others`.
        atol: The largest derivative or change that counts as rounding, and not as a dependency. It
            also hides true dependencies that are this small.

    Returns:
        The dependency matrix. Its `effects` are the measured ones, whatever `atol` is.

    Raises:
        ValueError: An argument is not as described, or the function changes an nnx object.
    """
    inputs = _array(inputs)
    is_ids = not is_float(inputs)
    by_default, witnesses = witnesses is None, _checked_witnesses(witnesses, is_ids)
    sample = None if sample is None else whole_number("sample", sample, 1)
    seed = whole_number("seed", seed, 0)
    if not (isinstance(atol, Real) and 0 <= atol < np.inf):
        raise ValueError(f"atol is {atol!r}; it must be a finite number of at least 0")
    if others is not None and np.shape(others) != inputs.shape:
        raise ValueError(f"others are {np.shape(others)}; inputs are {inputs.shape}")
    num_positions = inputs.ndim if is_ids else inputs.ndim - 1
    applied = function if weights is None else partial(function, weights)
    before, after = _positions(applied, inputs, num_positions)
    rng = np.random.default_rng((seed, 1))  # differs from a generator that drew the inputs
    size = int(np.prod(after)), int(np.prod(before))
    others = _others(inputs, rng) if others is None else jnp.asarray(others, inputs.dtype)
    unchanged = (others == inputs).reshape(size[1], -1).all(axis=1)
    if unchanged.any():
        place = place_name(np.unravel_index(int(unchanged.argmax()), before))
        raise ValueError(f"others are what inputs are at {place}; they must differ everywhere")
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
            except Exception as error:  # JAX raises many types, for loops, callbacks and refs
                if not by_default:
                    raise
                remarks += (f"there is no derivative: {str(error).splitlines()[0]}",)
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
        raise ValueError(f"inputs are {type(inputs).__name__}; they must be one array") from error


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
            raise ValueError("inputs are integers, of which there is no derivative; give floats")
    if not chosen:
        raise ValueError(f"witnesses is empty; give some of {', '.join(possible)}")
    return chosen


def _positions(
    function: Callable[[Array], Array], inputs: Array, num_positions: int
) -> tuple[Shape, Shape]:
    """Returns the shapes of the position axes of (inputs, outputs)."""
    if not num_positions or not inputs.size:
        raise ValueError(
            f"inputs are {inputs.dtype} {inputs.shape}; they must be ids [length] or "
            "[batch, length], or floats with their features as a last axis more"
        )
    try:
        output = jax.eval_shape(function, inputs)
    except TraceContextError as error:  # Dropout updates a counter, BatchNorm its statistics
        raise ValueError(
            f"the function changes an nnx object while it is traced ({error}): call model.eval(), "
            "which turns off dropout and the statistics of BatchNorm, before you certify the "
            "model; call a Linen model in ToNNX with rngs=nnx.Rngs()"
        ) from error
    if not hasattr(output, "shape") or len(output.shape) < num_positions:
        raise ValueError(
            f"the function returns {output}; it must return one array whose first {num_positions} "
            "axes are positions, like those of its inputs"
        )
    return inputs.shape[:num_positions], output.shape[:num_positions]


def _others(inputs: Shaped[Array, "*shape"], rng: np.random.Generator) -> Shaped[Array, "*shape"]:
    """Draws another value for each position."""
    if is_float(inputs):
        size = max(float(jnp.std(inputs.astype(jnp.float32))), 1.0)
        return jnp.asarray(size * rng.normal(size=inputs.shape), inputs.dtype)
    ids = np.unique(np.append(np.asarray(inputs), [0, 1]))  # at least two ids
    at = np.searchsorted(ids, np.asarray(inputs))
    drawn = ids[(at + rng.integers(1, len(ids), inputs.shape)) % len(ids)]
    return jnp.asarray(drawn, inputs.dtype)


_WHY = {
    "derivative": "a path leads there, but the derivative is 0 at this point: its effects cancel, "
    "are rounded away or end in a flat place (a ReLU below 0)",
    "change": "a path leads there, but this change was rounded away or ends in a flat place",
    "taint": NO_PATH,
}
_INFINITE = "what stops a path was an exact 0, which an infinite value gets past"


def _disagreements(
    effects: Mapping[str, Shaped[np.ndarray, "outputs inputs"]], after: Shape, before: Shape
) -> Iterator[Disagreement]:
    """Yields the pairs on which one witness saw no effect and another saw one."""
    for witness, seen in effects.items():
        others = [other for name, other in effects.items() if name != witness]
        largest = np.fmax.reduce([np.zeros_like(seen), *others])
        for output, input in np.argwhere((seen == 0) & (largest > 0)):
            is_infinite = witness == "taint" and np.isinf(largest[output, input])
            why = _INFINITE if is_infinite else _WHY[witness]
            places = np.unravel_index(output, after), np.unravel_index(input, before)
            yield Disagreement(*(tuple(map(int, place)) for place in places), why=why)


def place_name(place: tuple[int | np.integer, ...]) -> str:
    """Returns a position as text, with its batch element if there is a batch axis."""
    return str(place[0]) if len(place) == 1 else f"{place[-1]} of row {place[0]}"
