"""The matrix of an affine map as a value with a product.

A kernel is an array [in_dim, out_dim] or one of the classes below. A class represents such an array
in another layout or format: packed for decoding steps, as 8-bit integers, or with a low-rank update
(`low_rank.LowRankKernel`). All are pytrees, so they are stacked, scanned over, jitted and vmapped
like arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from jaxformer.functional.linear.products import STORED, contract
from jaxformer.functional.symbolic import at_most

FEW_ROWS = 64  # the most rows of x that a packed kernel multiplies part by part


class Kernel:
    """Base class of values that represent an array [*layers, in_dim, out_dim]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        raise TypeError(f"{type(self).__name__} has no shape")

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Computes x W for x [rows, in_dim]; returns [rows, out_dim] in `dtype`."""
        raise TypeError(f"{type(self).__name__} has no product")

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns the represented array."""
        raise TypeError(f"{type(self).__name__} has no dense form")


AnyKernel = Float[Array, "..."] | Kernel


def product(
    x: Float[Array, "rows in_dim"],
    kernel: Float[Array, "in_dim out_dim"] | Kernel,
    dtype: DTypeLike | None = None,
) -> Float[Array, "rows out_dim"]:
    """Computes x W with operands in the dtype of x; returns `dtype` (None: that of x).

    Remat policy "dots" stores the result.
    """
    if isinstance(kernel, Kernel):
        y = kernel.times(x, dtype or x.dtype)
    else:
        y = contract("bi,io->bo", x, kernel.astype(x.dtype), dtype)
    return checkpoint_name(y, STORED)


def dense(kernel: AnyKernel) -> Float[Array, "..."]:
    """Returns the array that a kernel represents; an array represents itself."""
    return kernel.dense() if isinstance(kernel, Kernel) else kernel


def is_kernel(x: object) -> bool:
    """Returns whether x is a `Kernel`, not an array."""
    return isinstance(x, Kernel)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedKernel(Kernel):
    """Wᵀ split into equal parts [parts, rows, in_dim], with rows of zeros after the out_dim-th.

    This layout is for decoding steps, which read every weight for a few tokens. The weights of one
    output are contiguous. With one part per core XLA:CPU computes the parts in parallel, whereas it
    computes a single product with few columns on one thread. A step of GPT-2 124M with batch size 8
    took 38 ms in this layout and 77 ms as x W (two cores, one run, medians).
    """

    parts: Any  # not annotated as an array: JAX also fills the fields with placeholders
    out_dim: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        return (*self.parts.shape[:-3], self.parts.shape[-1], self.out_dim)

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Multiplies part by part if x has at most FEW_ROWS rows, otherwise with one plain product.

        A plain product uses all cores if there are many rows. It is also the only correct choice
        there: XLA:CPU of jaxlib 0.10.2 compiles norm → broadcast over the parts → batched product
        of 4,096 rows or more into a wrong program (docs/hazards.md).
        """
        if not at_most(x.shape[0], FEW_ROWS):
            rows = self.parts.reshape(-1, x.shape[-1])[: self.out_dim]
            return contract("bi,oi->bo", x, rows, dtype)
        copies = jnp.broadcast_to(x, (len(self.parts), *x.shape))
        y = contract("poi,pbi->pob", self.parts, copies, dtype)
        return y.reshape(-1, len(x))[: self.out_dim].T

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns the represented array."""
        *layers, _, _, in_dim = self.parts.shape
        return self.parts.reshape(*layers, -1, in_dim)[..., : self.out_dim, :].mT


def pack(kernel: AnyKernel, dtype: DTypeLike, parts: int) -> PackedKernel:
    """Converts a kernel to a `PackedKernel` of `parts` parts in `dtype`."""
    rows = dense(kernel).astype(dtype).mT
    *layers, out_dim, in_dim = rows.shape
    padding = [(0, 0)] * len(layers) + [(0, -out_dim % parts), (0, 0)]
    return PackedKernel(jnp.pad(rows, padding).reshape(*layers, parts, -1, in_dim), out_dim)


# The fewest inputs of a packed kernel. On two cores packing was faster with 512, not with 128.
_PACKED_INPUTS = 384


def for_small_steps(kernel: AnyKernel, dtype: DTypeLike, parts: int) -> AnyKernel:
    """Converts a kernel to the layout for decoding: packed into `parts` parts, in `dtype`.

    Packed kernels and kernels of integers are returned unchanged. A kernel with few inputs becomes
    a plain array in `dtype`: the product of a packed kernel must be transposed, which takes as long
    as such a small product.
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

    Attributes:
        values: int8 [*layers, out_dim, in_dim], −127 … 127.
        scale: float32 [*layers, out_dim].
        offset: float32 [*layers, out_dim].
    """

    values: Any
    scale: Any
    offset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        *layers, out_dim, in_dim = self.values.shape
        return (*layers, in_dim, out_dim)

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Computes x W; scale and offset apply to sums, so each integer is multiplied once."""
        # Without the barrier XLA moves the conversion, which does not depend on x, out of a
        # decoding loop. Each step then reads four bytes a weight: 15 ms instead of 5 for GPT-2's
        # logits on two cores.
        values, x = jax.lax.optimization_barrier((self.values, x))
        if not at_most(x.shape[0], FEW_ROWS):
            rows = values.astype(x.dtype)
            sums = contract("bi,oi->bo", x, rows, jnp.float32)
        else:
            # XLA:CPU has no fast product of integers, or of operands that it converts first. Inside
            # a multiply-and-reduce the conversion is free. A single row of x has no batch axis
            # here: with one, jaxlib 0.10.2 took 20 to 40 times as long.
            x32 = x.astype(jnp.float32)
            x32 = x32[0] if len(x) == 1 else x32[:, None]
            sums = (values * x32).sum(axis=-1).reshape(len(x), -1)
        total = x.astype(jnp.float32).sum(axis=-1, keepdims=True)
        return (sums * self.scale + total * self.offset).astype(dtype)

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns the represented array."""
        return (self.values * self.scale[..., None] + self.offset[..., None]).mT


def quantize(kernel: Float[Array, "*layers in_dim out_dim"]) -> Int8Kernel:
    """Returns the nearest `Int8Kernel`: 255 levels from an output's smallest weight to its largest.

    scale = (max_i W[i, o] − min_i W[i, o]) / 254, or 1 where float32 cannot represent that step,
    and offset = (max + min) / 2. A weight's error is at most scale / 2 plus a rounding of float32.
    """
    rows = kernel.astype(jnp.float32).mT
    least, most = rows.min(axis=-1), rows.max(axis=-1)
    offset = least / 2 + most / 2  # a sum might overflow
    step = most / 254 - least / 254
    scale = jnp.where(step > 0, step, 1.0)
    values = jnp.round((rows - offset[..., None]) / scale[..., None])
    # If the range is only a few roundings of the offset, the offset is not in its middle.
    return Int8Kernel(jnp.clip(values, -127, 127).astype(jnp.int8), scale, offset)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Table:
    """A table of vectors: table[v] ≈ values[v] · scale[v] + offset[v].

    Its transpose is an `Int8Kernel`.

    Attributes:
        values: int8 [rows, dim].
        scale: float32 [rows].
        offset: float32 [rows].
    """

    values: Any
    scale: Any
    offset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented table."""
        return self.values.shape

    @property
    def T(self) -> Int8Kernel:
        """The transposed table, as a kernel."""
        return Int8Kernel(self.values, self.scale, self.offset)

    def dense(self) -> Float[Array, "rows dim"]:
        """Returns the represented table."""
        return self.T.dense().mT

    def astype(self, dtype: DTypeLike) -> "Int8Table":
        """Returns the table unchanged: callers cast the vectors that they look up."""
        return self

    def take(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
        """Looks up the vectors at `index`; an index past the end of the table returns NaN."""
        values = jnp.take(self.values, index, axis=0, mode="clip")
        scale, offset = (
            jnp.take(x, index, mode="fill", fill_value=jnp.nan)[..., None]
            for x in (self.scale, self.offset)
        )
        return values * scale + offset


def quantize_table(table: Float[Array, "rows dim"]) -> Int8Table:
    """Returns the nearest `Int8Table`, with a scale and an offset for each row."""
    kernel = quantize(table.mT)
    return Int8Table(kernel.values, kernel.scale, kernel.offset)
