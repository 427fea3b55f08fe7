"""Marks of loops: the steps of a scan, and loops whose number of steps depends on the inputs.

`vmap` combines many loops into one. Its condition is bool [*rows], and everything carried has these
rows as its leading axes. A row that has ended does not change while other rows continue.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import bounds_of
from jaxformer.verify.marks import Bounds, Marked, Marks

# Flags in an additional last byte of all marks in `of_any_length`.
VARIES, UNSURE = np.uint8(1), np.uint8(2)


def of_any_length(
    step: Callable[[list[Marked]], tuple[Marked, Sequence[Marked]]],
    decided: Marks,
    begin: Sequence[Marked],
    entered: Sequence[Marked],
    left: Sequence[Marked],
) -> list[Marked]:
    """Marks the outputs of a loop by all inputs that could reach them in any number of steps.

    A row is unsure if an input decides when it ends, or if it reads an unsure row. An unsure row
    gets the marks of all further steps; steps are repeated until they add no marks. Other rows keep
    their marks.

    Args:
        step: Maps the carry to (condition, carry) after one more step, with marks that are
            `widened`.
        decided: Marks of the conditions that were computed.
        begin: The carry before the loop.
        entered: The carry before the last step that was taken; this step is known to terminate.
        left: The carry after the loop.

    Returns:
        The carry after the loop, with the new marks.
    """
    num_rows = decided.ndim - 1
    shape = np.shape(left[0].value)[:num_rows]
    reached = m.union(decided, *(_by_row(x.marks, num_rows) for x in (*begin, *left)))
    flags = np.where(m.expand(decided, shape).any(axis=-1), VARIES | UNSURE, VARIES)
    marks = np.concatenate([m.expand(reached, shape), flags[..., None]], axis=-1)
    while True:
        # Everything carried gets VARIES, so that no current 0 stops the marks of a later step.
        goes_on, carry = step([Marked(x.value, _of_all(marks, x.value)) for x in entered])
        brought = (goes_on.marks, *(_by_row(x.marks, num_rows) for x in carry))
        following = m.union(marks, *brought)
        if (following == marks).all():
            break
        marks = following
    unsure = (marks[..., -1] & UNSURE) != 0
    return [_replaced(x, unsure, marks[..., :-1]) for x in left]


def widened(x: Marked) -> Marked:
    """Appends a byte, which is 0, to the marks of x."""
    return x if x.marks is None else x._replace(marks=m.widened(x.marks))


def _by_row(marks: Marks | None, num_rows: int) -> Marks | None:
    """Returns [*rows, bytes]: the union of the marks of each row."""
    if marks is None:
        return None
    whole = m.merged(marks, range(num_rows, marks.ndim - 1))
    return whole.reshape(*whole.shape[:num_rows], -1)


def _of_all(marks: np.ndarray, value: ArrayLike) -> np.ndarray:
    """Reshapes marks [*rows, bytes] to broadcast over a value whose leading axes are the rows."""
    features = np.ndim(value) - (marks.ndim - 1)
    return marks.reshape(*marks.shape[:-1], *(1,) * features, -1)


def _replaced(x: Marked, where: Bool[np.ndarray, "*rows"], marks: Marks) -> Marked:
    """Replaces the marks of some rows."""
    if not np.size(x.value):
        return x
    before = np.uint8(0) if x.marks is None else x.marks
    where = _of_all(where[..., None], x.value)
    return Marked(x.value, m.compressed(np.where(where, _of_all(marks, x.value), before)))


# ---- steps


def where(goes_on: Bool[Array, "*rows"], x: Marked, y: Marked) -> Marked:
    """Returns x in the rows that continue and y in the others.

    The result lacks the marks of the condition, which `of_any_length` adds.

    Args:
        goes_on: The condition: bool [*rows], or one bool for the whole loop.
        x: The carry after the step.
        y: The carry before the step.
    """
    if np.ndim(goes_on) == 0:
        return x
    rows = np.reshape(goes_on, np.shape(goes_on) + (1,) * (np.ndim(x.value) - np.ndim(goes_on)))
    whole = np.broadcast_to(rows, np.shape(x.value))
    marks = m.union(m.only_where(x.marks, whole), m.only_where(y.marks, ~whole))
    bounds = None
    if x.bounds is not None or y.bounds is not None:
        bounds = Bounds(*map(np.where, (whole, whole), bounds_of(x), bounds_of(y)))
    return Marked(jnp.where(whole, x.value, y.value), marks, bounds)


def at(x: Marked, step: int) -> Marked:
    """Returns the slice of a scanned array that a step reads."""
    marks, bounds = x.marks, x.bounds
    if marks is not None:
        marks = marks[step if marks.shape[0] > 1 else 0]
    if bounds is not None:
        bounds = Bounds(*(np.broadcast_to(bound, np.shape(x.value))[step] for bound in bounds))
    return Marked(x.value[step], marks, bounds)


def stacked(steps: Sequence[Marked]) -> Marked:
    """Stacks the outputs of all steps."""
    value, bounds = jnp.stack([x.value for x in steps]), None
    if all(x.marks is None for x in steps):
        return Marked(value)
    marks = np.broadcast_arrays(*(np.uint8(0) if x.marks is None else x.marks for x in steps))
    if any(x.bounds is not None for x in steps):
        shape, sides = np.shape(steps[0].value), zip(*map(bounds_of, steps), strict=True)
        bounds = Bounds(*(np.stack([np.broadcast_to(x, shape) for x in side]) for side in sides))
    return Marked(value, np.stack(marks), bounds)
