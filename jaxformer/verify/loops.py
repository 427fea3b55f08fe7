"""Taint marks of loops: scans, and while loops whose number of steps depends on the inputs.

`vmap` combines many loops into one loop with a batch. The condition of this loop is bool [*batch],
and the batch axes are the leading axes of all carried arrays. The carried values of a batch element
no longer change once its condition is False.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import element_bounds
from jaxformer.verify.marks import Bounds, Marked, Marks

# Flags in the last byte of an element's taint marks. `VARIES`: the value is not a constant, because
# it belongs to a weight or may change from step to step of a loop. `UNSURE`: the batch element is
# uncertain, as defined in `marks_of_any_length`.
VARIES, UNSURE = np.uint8(1), np.uint8(2)


def marks_of_any_length(
    step: Callable[[list[Marked]], tuple[Marked, Sequence[Marked]]],
    decided: Marks,
    begin: Sequence[Marked],
    entered: Sequence[Marked],
    left: Sequence[Marked],
) -> list[Marked]:
    """Adds the taint marks of all inputs that could reach a loop's outputs in any number of steps.

    A batch element of the loop is *uncertain* if its number of steps depends on an input, or if its
    values depend on an uncertain element. An uncertain element also gets the taint marks that later
    steps may add. The function repeats the last step of the loop until the taint marks no longer
    change. Batch elements that are not uncertain keep their taint marks.

    Args:
        step: Maps a carry to (the loop's condition for this carry, the carry after one more step).
            The taint marks have the extra byte of `with_extra_byte`.
        decided: The union of the condition's taint marks over all its evaluations.
        begin: The carry before the loop.
        entered: The carry before the last executed step. A repetition of this step terminates,
            because the step has already been executed with these values.
        left: The carry after the loop.

    Returns:
        The carry after the loop, with the new taint marks.
    """
    num_batch_axes = decided.ndim - 1
    shape = np.shape(left[0].value)[:num_batch_axes]
    reached = m.union(decided, *(_by_element(x.marks, num_batch_axes) for x in (*begin, *left)))
    flags = np.where(m.expand(decided, shape).any(axis=-1), VARIES | UNSURE, VARIES)
    marks = np.concatenate([m.expand(reached, shape), flags[..., None]], axis=-1)
    while True:
        # All values that the loop carries have the flag `VARIES`. Otherwise a product with a value
        # that is 0 in this step would count as 0 in later steps too.
        goes_on, carry = step([Marked(x.value, _broadcast_marks(marks, x.value)) for x in entered])
        brought = (goes_on.marks, *(_by_element(x.marks, num_batch_axes) for x in carry))
        following = m.union(marks, *brought)
        if (following == marks).all():
            break
        marks = following
    unsure = (marks[..., -1] & UNSURE) != 0
    return [_replace_marks(x, unsure, marks[..., :-1]) for x in left]


def with_extra_byte(x: Marked) -> Marked:
    """Appends a zero byte to the taint marks of each element of `x`."""
    return x if x.marks is None else x._replace(marks=m.with_extra_byte(x.marks))


def _by_element(marks: Marks | None, num_batch_axes: int) -> Marks | None:
    """Returns the union of the taint marks within each batch element: uint8 [*batch, bytes]."""
    if marks is None:
        return None
    whole = m.merge(marks, range(num_batch_axes, marks.ndim - 1))
    return whole.reshape(*whole.shape[:num_batch_axes], -1)


def _broadcast_marks(marks: np.ndarray, value: ArrayLike) -> np.ndarray:
    """Reshapes taint marks [*batch, bytes] to broadcast over a value [*batch, …]."""
    features = np.ndim(value) - (marks.ndim - 1)
    return marks.reshape(*marks.shape[:-1], *(1,) * features, -1)


def _replace_marks(x: Marked, where: Bool[np.ndarray, "*batch"], marks: Marks) -> Marked:
    """Replaces the taint marks of the batch elements where `where` is True."""
    if not np.size(x.value):
        return x
    before = np.uint8(0) if x.marks is None else x.marks
    where = _broadcast_marks(where[..., None], x.value)
    return Marked(x.value, m.compress(np.where(where, _broadcast_marks(marks, x.value), before)))


# ---- steps


def where(goes_on: Bool[Array, "*batch"], x: Marked, y: Marked) -> Marked:
    """Returns x for the batch elements whose loop continues, and y for the other batch elements.

    The result does not include the taint marks of the condition, which `marks_of_any_length` adds.

    Args:
        goes_on: The condition of the loop: bool [*batch], or one bool for the whole loop.
        x: The carry after the step.
        y: The carry before the step.
    """
    if np.ndim(goes_on) == 0:
        return x
    mask = np.reshape(goes_on, np.shape(goes_on) + (1,) * (np.ndim(x.value) - np.ndim(goes_on)))
    whole = np.broadcast_to(mask, np.shape(x.value))
    marks = m.union(m.only_where(x.marks, whole), m.only_where(y.marks, ~whole))
    bounds = None
    if x.bounds is not None or y.bounds is not None:
        bounds = Bounds(*map(np.where, (whole, whole), element_bounds(x), element_bounds(y)))
    return Marked(jnp.where(whole, x.value, y.value), marks, bounds)


def at(x: Marked, step: int) -> Marked:
    """Returns the slice of a scanned array that step number `step` reads."""
    marks, bounds = x.marks, x.bounds
    if marks is not None:
        marks = marks[step if marks.shape[0] > 1 else 0]
    if bounds is not None:
        bounds = Bounds(*(np.broadcast_to(bound, np.shape(x.value))[step] for bound in bounds))
    return Marked(x.value[step], marks, bounds)


def stacked(steps: Sequence[Marked]) -> Marked:
    """Stacks the outputs of all steps of a scan."""
    value, bounds = jnp.stack([x.value for x in steps]), None
    if all(x.marks is None for x in steps):
        return Marked(value)
    marks = np.broadcast_arrays(*(np.uint8(0) if x.marks is None else x.marks for x in steps))
    if any(x.bounds is not None for x in steps):
        shape, sides = np.shape(steps[0].value), zip(*map(element_bounds, steps), strict=True)
        bounds = Bounds(*(np.stack([np.broadcast_to(x, shape) for x in side]) for side in sides))
    return Marked(value, np.stack(marks), bounds)
