"""How marks pass through products: each side's where the other is not 0.

`rule(params, inputs, outputs)`, as in `passing`; `convolved` makes one for a primitive.
"""

import jax
import numpy as np

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Marked, counts, is_zero


def product(params, inputs, outputs):
    """out[b, m, n] = Σ_k a[b, m, k] b[b, k, n]: each side's marks where the other is not 0."""
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    sides = [
        _Side(x, tuple(batch), tuple(contracted))
        for x, batch, contracted in zip(
            inputs, (left_batch, right_batch), (left, right), strict=True
        )
    ]
    a, b = sides
    whole = []
    if inputs[0].marks is not None:
        passed = _through(a.marks(), b.live())  # [B, M, N, bytes]
        whole.append(a.shaped(passed, b, first=True))
    if inputs[1].marks is not None:
        passed = _through(b.marks(), a.live())  # [B, N, M, bytes]
        whole.append(a.shaped(passed, b, first=False))
    return [m.compressed(m.union(*whole))]


class _Side:
    """An operand of a product as [batch, free, contracted], each one axis."""

    def __init__(self, x: Marked, batch, contracted):
        self.x, self.shape = x, np.shape(x.value)
        free = tuple(i for i in range(len(self.shape)) if i not in (*batch, *contracted))
        self.groups = (batch, free, contracted)

    def sizes(self, group: int):
        return [self.shape[axis] for axis in self.groups[group]]

    def live(self):
        """bool [batch, free, contracted], or None if no element is a clean zero."""
        live = counts(self.x, is_zero)
        if live is None:
            return None
        order = [axis for group in self.groups for axis in group]
        sizes = [int(np.prod(self.sizes(group))) for group in range(3)]
        return live.transpose(order).reshape(sizes)

    def marks(self):
        """The marks in the same order, a group of axes of size 1 staying so."""
        marks = self.x.marks
        order = [axis for group in self.groups for axis in group]
        marks = marks.transpose(*order, marks.ndim - 1)
        full, merged, start = [], [], 0
        for group in range(3):
            sizes = self.sizes(group)
            own = marks.shape[start : start + len(sizes)]
            uniform = all(size == 1 for size in own)
            full += [1] * len(sizes) if uniform else sizes
            merged.append(1 if uniform else int(np.prod(sizes)))
            start += len(sizes)
        return m.expand(marks, full).reshape(*merged, marks.shape[-1])

    def shaped(self, passed, other, first: bool):
        """[batch, own free, other's free, bytes] as the product's axes are."""
        if not first:
            passed = passed.swapaxes(1, 2)
        groups = (self.sizes(0), self.sizes(1), other.sizes(1))
        shape = []
        for size, sizes in zip(passed.shape, groups, strict=False):
            shape += [1] * len(sizes) if size == 1 else sizes
        return passed.reshape(*shape, passed.shape[-1])


def _through(marks, live):
    """marks [B, M, K, bytes], live [B, N, K]: by k, to every n that k reaches → [B, M, N, bytes].

    B, M and K of the marks may be 1; so may N of the result.
    """
    if live is None:
        return m.merged(marks, (2,))
    if (live == live[:, :1]).all():  # the same for each n
        some = m.kept(np.broadcast_to(marks, (*_larger(marks, live), marks.shape[-1])), live[:, :1])
        return m.merged(some, (2,)) if some is not None else np.zeros_like(marks[:, :, :1])
    if marks.shape[2] == 1:
        return np.where(live.any(axis=2)[:, None, :, None], marks, np.uint8(0))
    paths = live.astype(np.float32)
    reached = []
    for row in range(marks.shape[1]):
        bits = np.unpackbits(marks[:, row], axis=-1).astype(np.float32)
        reached.append(np.packbits(paths @ bits > 0, axis=-1))
    return np.stack(reached, axis=1)


def _larger(marks, live):
    """The shape of marks [B, M, K] beside live [B, N, K]."""
    return (max(marks.shape[0], live.shape[0]), marks.shape[1], max(marks.shape[2], live.shape[2]))


def convolved(primitive):
    """The same convolution of ones and zeros, bit by bit."""

    def rule(params, inputs, outputs):
        whole = []
        for side, (x, other) in enumerate((inputs, inputs[::-1])):
            if x.marks is None:
                continue
            live = counts(other, is_zero)
            paths = np.ones(np.shape(other.value)) if live is None else live
            paths = jax.numpy.asarray(paths, np.float32)

            def one(bits, paths=paths, side=side):
                operands = (bits, paths) if side == 0 else (paths, bits)
                return primitive.bind(*operands, **{**params, "preferred_element_type": None})

            bits = np.unpackbits(m.expand(x.marks, np.shape(x.value)), axis=-1)
            found = jax.vmap(one, -1, -1)(jax.numpy.asarray(bits, np.float32))
            whole.append(np.packbits(np.asarray(found) > 0.5, axis=-1))
        return [m.union(*whole)]

    return rule
