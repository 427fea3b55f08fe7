"""The matrix of an affine map as a value with a product.

A kernel is an array [in_dim, out_dim], or one of the values below, which stands for such an array
and is laid out or stored in another way: packed for many small steps, as 8-bit integers, or frozen
with an update of low rank. All are pytrees, so they are stacked, scanned over, jitted and vmapped
like arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

FEW_ROWS = 64  # rows of x up to which a packed kernel is multiplied part by part


class Kernel:
    """What stands for an array [*layers, in_dim, out_dim]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        raise TypeError(f"{type(self).__name__} has no shape")

    def times(self, x, dtype):
        """x W for x [rows, in_dim]: [rows, out_dim] in `dtype`."""
        raise TypeError(f"{type(self).__name__} has no product")

    def dense(self):
        """The array that it stands for."""
        raise TypeError(f"{type(self).__name__} has no dense form")


def product(
    x: Float[Array, "rows in_dim"], kernel: Float[Array, "in_dim out_dim"] | Kernel, dtype=None
) -> Float[Array, "rows out_dim"]:
    """x W from operands in the dtype of x, in `dtype` (None: that of x)."""
    dtype = dtype or x.dtype
    if isinstance(kernel, Kernel):
        return kernel.times(x, dtype)
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def dense(kernel):
    """The array that a kernel stands for; an array is one."""
    return kernel.dense() if isinstance(kernel, Kernel) else kernel


def is_kernel(x) -> bool:
    return isinstance(x, Kernel)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedKernel(Kernel):
    """Wᵀ cut into equal parts [parts, rows, in_dim], with rows of zeros after the out_dim-th.

    For small steps, which read every weight for a few tokens: the weights of one output lie
    together, and with a part for each core XLA:CPU computes the parts side by side, where it
    computes one product with few columns on one thread. A step of GPT-2 124M at batch 8 took 38 ms
    so and 77 ms as x W (two cores, one run, medians).
    """

    parts: Any  # fields are not annotated with arrays: JAX fills them with other things in passing
    out_dim: int = field(metadata={"static": True})

    @property
    def shape(self):
        return (*self.parts.shape[:-3], self.parts.shape[-1], self.out_dim)

    def times(self, x, dtype):
        """Part by part for a few rows, else one plain product.

        A plain product keeps every core busy with many rows, and must be what they get: XLA:CPU of
        jaxlib 0.10.2 compiles norm → broadcast over the parts → batched product of 4,096 rows or
        more into a wrong program (docs/hazards.md).
        """
        if len(x) > FEW_ROWS:
            rows = self.parts.reshape(-1, x.shape[-1])[: self.out_dim]
            return jnp.einsum("bi,oi->bo", x, rows, preferred_element_type=dtype)
        copies = jnp.broadcast_to(x, (len(self.parts), *x.shape))
        y = jnp.einsum("poi,pbi->pob", self.parts, copies, preferred_element_type=dtype)
        return y.reshape(-1, len(x))[: self.out_dim].T

    def dense(self):
        *layers, _, _, in_dim = self.parts.shape
        return self.parts.reshape(*layers, -1, in_dim)[..., : self.out_dim, :].mT


def pack(kernel, dtype, parts: int) -> PackedKernel:
    """A kernel as a `PackedKernel` of so many parts, in `dtype`."""
    rows = dense(kernel).astype(dtype).mT
    *layers, out_dim, in_dim = rows.shape
    padding = [(0, 0)] * len(layers) + [(0, -out_dim % parts), (0, 0)]
    return PackedKernel(jnp.pad(rows, padding).reshape(*layers, parts, -1, in_dim), out_dim)


_PACKED_INPUTS = 384  # inputs from which packing is faster on two cores: at 128 no, at 512 yes


def for_small_steps(kernel, dtype, parts: int):
    """The kernel as many small steps want it: packed, in `dtype`; one of integers stays as it is.

    One of few inputs is not packed: its output, which must be transposed, is as much work.
    """
    if isinstance(kernel, (PackedKernel, Int8Kernel)):
        return kernel
    if kernel.shape[-2] < _PACKED_INPUTS:
        return dense(kernel).astype(dtype)
    return pack(kernel, dtype, parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Kernel(Kernel):
    """W[i, o] ≈ values[o, i] · scale[o] + offset[o].

    values: int8 [*layers, out_dim, in_dim], −127 … 127; scale, offset: float32 [*layers, out_dim].
    """

    values: Any
    scale: Any
    offset: Any

    @property
    def shape(self):
        *layers, out_dim, in_dim = self.values.shape
        return (*layers, in_dim, out_dim)

    def times(self, x, dtype):
        """Scale and offset are for sums, so each integer is converted and multiplied once."""
        # A conversion that does not depend on x is moved out of a decoding loop, which then reads
        # four bytes a weight at each step: 15 ms instead of 5 for GPT-2's logits on two cores.
        values, x = jax.lax.optimization_barrier((self.values, x))
        if len(x) > FEW_ROWS:
            rows = values.astype(x.dtype)
            sums = jnp.einsum("bi,oi->bo", x, rows, preferred_element_type=jnp.float32)
        else:
            # XLA:CPU has no fast product of integers, nor of what is converted first; but inside a
            # multiply-and-reduce the conversion costs nothing. One row is written without a batch
            # axis: with one, jaxlib 0.10.2 took 20 to 40 times as long.
            x32 = x.astype(jnp.float32)
            x32 = x32[0] if len(x) == 1 else x32[:, None]
            sums = (values * x32).sum(axis=-1).reshape(len(x), -1)
        total = x.astype(jnp.float32).sum(axis=-1, keepdims=True)
        return (sums * self.scale + total * self.offset).astype(dtype)

    def dense(self):
        return (self.values * self.scale[..., None] + self.offset[..., None]).mT


def quantize(kernel: Float[Array, "*layers in_dim out_dim"]) -> Int8Kernel:
    """The nearest `Int8Kernel`: 255 steps from the smallest weight of an output to its largest.

    scale = (max_i W[i, o] − min_i W[i, o]) / 254, 1 where float32 has no such step, and
    offset = (max + min) / 2. Each weight is off by at most half of its output's
    scale, and a rounding of float32.
    """
    rows = kernel.astype(jnp.float32).mT
    least, most = rows.min(axis=-1), rows.max(axis=-1)
    offset = least / 2 + most / 2  # a sum might overflow
    step = most / 254 - least / 254
    scale = jnp.where(step > 0, step, 1.0)
    values = jnp.round((rows - offset[..., None]) / scale[..., None])
    # Where the range is a few roundings of the offset, the offset is not in its middle.
    return Int8Kernel(jnp.clip(values, -127, 127).astype(jnp.int8), scale, offset)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel(Kernel):
    """W + scale · A B: W frozen, A and B learnt (LoRA, Hu et al. 2021).

    frozen: W, any kernel, into which no gradient flows; down: A [*layers, in_dim, rank]; up: B
    [*layers, rank, out_dim].
    """

    frozen: Any
    down: Any
    up: Any
    scale: float = field(default=1.0, metadata={"static": True})

    @property
    def shape(self):
        return self.frozen.shape

    def times(self, x, dtype):
        frozen = jax.tree.map(jax.lax.stop_gradient, self.frozen)
        update = product(product(x, self.down), self.up, dtype)
        return product(x, frozen, dtype) + jnp.asarray(self.scale, dtype) * update

    def dense(self):
        return dense(self.frozen) + self.scale * (self.down @ self.up)


def init_low_rank(key, kernel, rank: int, scale: float = 1.0) -> LowRankKernel:
    """An update that is 0 at first: A ~ N(0, 1/in_dim), B = 0."""
    *layers, in_dim, out_dim = kernel.shape
    if not 1 <= rank <= min(in_dim, out_dim):
        raise ValueError(
            f"rank is {rank}; of a kernel [{in_dim}, {out_dim}] it must be in 1 … "
            f"{min(in_dim, out_dim)}"
        )
    down = jax.random.normal(key, (*layers, in_dim, rank)) / in_dim**0.5
    return LowRankKernel(kernel, down, jnp.zeros((*layers, rank, out_dim)), scale)


def concatenated(kernels):
    """Kernels of one input side by side, as one; None if they cannot be."""
    kinds = set(map(type, kernels))
    if kinds == {Int8Kernel}:
        return Int8Kernel(
            jnp.concatenate([kernel.values for kernel in kernels], axis=-2),
            *(
                jnp.concatenate([getattr(kernel, name) for kernel in kernels], axis=-1)
                for name in ("scale", "offset")
            ),
        )
    if LowRankKernel in kinds:
        return _concatenated_updates(kernels)
    if any(map(is_kernel, kernels)):
        return None
    return jnp.concatenate(kernels, axis=-1)


def _concatenated_updates(kernels):
    """The same where some are `LowRankKernel`s: their updates are one, A side by side and B block
    by block, whose rank is the sum of theirs."""
    updated = [isinstance(kernel, LowRankKernel) for kernel in kernels]
    updates = [kernel for kernel, has_one in zip(kernels, updated, strict=True) if has_one]
    frozen = concatenated(
        [kernel.frozen if x else kernel for kernel, x in zip(kernels, updated, strict=True)]
    )
    if frozen is None or len({kernel.scale for kernel in updates}) > 1:
        return None
    ends = np.cumsum([kernel.shape[-1] for kernel in kernels])
    rows = []
    for kernel, end in zip(kernels, ends, strict=True):
        if isinstance(kernel, LowRankKernel):
            sides = [(0, 0)] * (kernel.up.ndim - 1)
            places = (int(end) - kernel.shape[-1], int(ends[-1] - end))
            rows.append(jnp.pad(kernel.up, [*sides, places]))
    down = jnp.concatenate([kernel.down for kernel in updates], axis=-1)
    return LowRankKernel(frozen, down, jnp.concatenate(rows, axis=-2), updates[0].scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Table:
    """A table of vectors, table[v] ≈ values[v] · scale[v] + offset[v]; transposed, it is an
    `Int8Kernel`.

    values: int8 [rows, dim]; scale, offset: float32 [rows].
    """

    values: Any
    scale: Any
    offset: Any

    @property
    def shape(self):
        return self.values.shape

    @property
    def T(self) -> Int8Kernel:
        return Int8Kernel(self.values, self.scale, self.offset)

    def astype(self, dtype) -> "Int8Table":
        """Itself: the vectors that it gives are cast."""
        return self

    def take(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
        """The vectors at these rows; NaN for a row that there is not."""
        values = jnp.take(self.values, index, axis=0, mode="clip")
        scale, offset = (
            jnp.take(x, index, mode="fill", fill_value=jnp.nan)[..., None]
            for x in (self.scale, self.offset)
        )
        return values * scale + offset


def quantize_table(table: Float[Array, "rows dim"]) -> Int8Table:
    """The nearest `Int8Table`, with a scale and an offset for each row."""
    kernel = quantize(table.mT)
    return Int8Table(kernel.values, kernel.scale, kernel.offset)
