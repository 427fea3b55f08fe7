"""Rules for products: the marks of a factor pass where the other factor is not 0.

Rules have the signature `rule(params, inputs, outputs)`, as in `primitives`. `convolved` makes the
rule of a primitive.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array, Bool, UInt8

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Found, Marked, Marks, Params, Rule, counts, is_zero


def product(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of `dot_general`: out[b, m, n] = Σ_k a[b, m, k] b[b, k, n].

    The marks of a factor pass where the other factor is not 0.
    """
    contracted, batch = params["dimension_numbers"]
    a, b = map(_Side, inputs, batch, contracted)
    passed = []  # [B, M, N, bytes]
    if a.x.marks is not None:
        passed.append(_through(a.marks(), b.live()))
    if b.x.marks is not None:
        passed.append(_through(b.marks(), a.live()).swapaxes(1, 2))
    return [m.compressed(m.union(*(a.shaped(marks, b) for marks in passed)))]


class _Side:
    """An operand of a product, viewed as an array with the axes [batch, free, contracted]."""

    def __init__(self, x: Marked, batch: Sequence[int], contracted: Sequence[int]) -> None:
        self.x, self.shape = x, np.shape(x.value)
        free = [i for i in range(len(self.shape)) if i not in (*batch, *contracted)]
        self.groups = (batch, free, contracted)
        self.order = [*batch, *free, *contracted]

    def sizes(self, group: int) -> list[int]:
        """Returns the sizes of the axes of a group: 0 batch, 1 free, 2 contracted."""
        return [self.shape[axis] for axis in self.groups[group]]

    def live(self) -> Bool[np.ndarray, "batch free contracted"] | None:
        """Returns bool [batch, free, contracted], false at unmarked zeros; None if there are none.

        A marked zero counts as true, because other inputs may change it.
        """
        live = counts(self.x, is_zero)
        if live is None:
            return None
        sizes = [int(np.prod(self.sizes(group))) for group in range(3)]
        return np.reshape(np.transpose(live, self.order), sizes)

    def marks(self) -> UInt8[np.ndarray, "batch free contracted bytes"]:
        """Returns the marks [batch, free, contracted, bytes].

        A group of axes along which the marks are constant has size 1.
        """
        assert self.x.marks is not None
        shape, full, merged = self.x.marks.shape, [], []
        for group, axes in enumerate(self.groups):
            uniform = all(shape[axis] == 1 for axis in axes)
            sizes = [1] * len(axes) if uniform else self.sizes(group)
            full += sizes
            merged.append(int(np.prod(sizes)))
        return m.expand(m.permuted(self.x.marks, self.order), full).reshape(*merged, shape[-1])

    def shaped(self, passed: UInt8[np.ndarray, "B M N bytes"], other: "_Side") -> Marks:
        """Reshapes [batch, own free, other's free, bytes] to the axes of the product."""
        groups = (self.sizes(0), self.sizes(1), other.sizes(1))
        shape = []
        for size, sizes in zip(passed.shape, groups, strict=False):
            shape += [1] * len(sizes) if size == 1 else sizes
        return passed.reshape(*shape, passed.shape[-1])


def _through(
    marks: UInt8[np.ndarray, "#B M #K bytes"], live: Bool[np.ndarray, "#B N #K"] | None
) -> UInt8[np.ndarray, "#B M #N bytes"]:
    """Passes marks along the contracted axis: element n gets the marks of each k that is live at n.

    Args:
        marks: uint8 [B, M, K, bytes], where B, M and K may be 1.
        live: bool [B, N, K].

    Returns:
        uint8 [B, M, N, bytes], where N may be 1.
    """
    if live is None:
        return m.merged(marks, (2,))
    if (live == live[:, :1]).all():  # the same for each n
        return m.merged(np.where(live[:, :1, :, None], marks, np.uint8(0)), (2,))
    if marks.shape[2] == 1:
        return np.where(np.expand_dims(live.any(axis=2), (1, 3)), marks, np.uint8(0))
    paths = live.astype(np.float32)
    reached = []
    for row in range(marks.shape[1]):
        bits = np.unpackbits(marks[:, row], axis=-1).astype(np.float32)
        reached.append(np.packbits(paths @ bits > 0, axis=-1))
    return np.stack(reached, axis=1)


def convolved(primitive: Primitive) -> Rule:
    """Makes the rule of a convolution: runs the same convolution on each bit of the marks."""

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        whole = []
        for side, (x, other) in enumerate((inputs, inputs[::-1])):
            if x.marks is None:
                continue
            live = counts(other, is_zero)
            paths = np.ones(np.shape(other.value)) if live is None else live
            paths = jnp.asarray(paths, np.float32)

            def convolve(bits: Array, paths: Array = paths, side: int = side) -> Array:
                operands = (bits, paths) if side == 0 else (paths, bits)
                return primitive.bind(*operands, **{**params, "preferred_element_type": None})

            whole.append(m.map_bits(convolve, x.marks, np.shape(x.value), np.float32))
        return [m.union(*whole)]

    return rule
