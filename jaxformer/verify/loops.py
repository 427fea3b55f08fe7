"""What comes out of a loop of which inputs decide, row by row, how long it goes on.

`vmap` makes one loop of many: its condition is bool [*rows], all that is carried has these rows as
its leading axes, and a row that has ended stays as it is while others go on.
"""

import numpy as np

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Marked

# A byte more than the inputs need, of all marks in here.
VARIES, UNSURE = np.uint8(1), np.uint8(2)


def of_any_length(step, decided, begin, entered, left) -> list[Marked]:
    """What is left, with the marks of all that any number of steps might have left.

    step(carry) → (condition, carry) of one more step, with marks that are `widened`; decided: marks
    of the conditions that there were; begin, entered, left: what is carried before the loop, before
    the last step that was taken (a step that is known to end), and at the end.

    A row is unsure if an input has decided on its end, or if it reads such a row. It is marked by
    all that steps bring to it, taken until they bring nothing more. Other rows keep their marks.
    """
    num_rows = decided.ndim - 1
    shape = np.shape(left[0].value)[:num_rows]
    reached = m.union(decided, *(_by_row(x.marks, num_rows) for x in (*begin, *left)))
    flags = np.where(m.expand(decided, shape).any(axis=-1), VARIES | UNSURE, VARIES)
    marks = np.concatenate([m.expand(reached, shape), flags[..., None]], axis=-1)
    while True:
        # All that is carried varies: no value that it has now (a 0) stops what a later step brings.
        goes_on, carry = step([Marked(x.value, _of_all(marks, x.value)) for x in entered])
        brought = (goes_on.marks, *(_by_row(x.marks, num_rows) for x in carry))
        following = m.union(marks, *brought)
        if (following == marks).all():
            break
        marks = following
    unsure = (marks[..., -1] & UNSURE) != 0
    return [_replaced(x, unsure, marks[..., :-1]) for x in left]


def widened(x: Marked) -> Marked:
    """The same marks, in a byte more."""
    if x.marks is None:
        return x
    return Marked(x.value, np.pad(x.marks, [(0, 0)] * (x.marks.ndim - 1) + [(0, 1)]))


def _by_row(marks, num_rows: int):
    """[*rows, bytes]: what any element of a row is marked by."""
    if marks is None:
        return None
    whole = m.merged(marks, range(num_rows, marks.ndim - 1))
    return whole.reshape(*whole.shape[:num_rows], -1)


def _of_all(marks, value):
    """Marks [*rows, bytes] of a value whose leading axes are those rows."""
    features = np.ndim(value) - (marks.ndim - 1)
    return marks.reshape(*marks.shape[:-1], *(1,) * features, -1)


def _replaced(x: Marked, where, marks) -> Marked:
    """The marks of x, but those of its rows where they are to be others."""
    if not np.size(x.value):
        return x
    own = np.uint8(0) if x.marks is None else x.marks
    where = _of_all(where[..., None], x.value)
    return Marked(x.value, m.compressed(np.where(where, _of_all(marks, x.value), own)))
