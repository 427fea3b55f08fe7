"""Kernels of linear layers: classes that represent a matrix and multiply by it.

A kernel is an array [in_dim, out_dim] or an instance of a class below. Each class represents the
array in another layout or format: packed for decoding steps, as 8-bit integers, or with a low-rank
update (`low_rank.LowRankKernel`). All classes are pytrees, so kernels can be stacked, scanned over,
jitted and vmapped like arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from jaxformer.functional.linear.products import STORED, contract
from jaxformer.functional.symbolic import at_most

# A packed kernel W computes the product x W separately for each of its parts if x has at most this
# many rows.
FEW_ROWS = 64


class Kernel:
    """Base class of values that represent an array [*layers, in_dim, out_dim]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        raise TypeError(f"{type(self).__name__} must override the property `shape`")

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Computes x W for x [rows, in_dim]; returns [rows, out_dim] in `dtype`."""
        raise TypeError(f"{type(self).__name__} must override the method `times`")

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns the represented array."""
        raise TypeError(f"{type(self).__name__} must override the method `dense`")


AnyKernel = Float[Array, "..."] | Kernel


def product(
    x: Float[Array, "rows in_dim"],
    kernel: Float[Array, "in_dim out_dim"] | Kernel,
    dtype: DTypeLike | None = None,
) -> Float[Array, "rows out_dim"]:
    """Computes x W with operands in the dtype of x.

    The product has `dtype`, which defaults to the dtype of x. The remat policy "dots" stores the
    product for the backward pass.
    """
    if isinstance(kernel, Kernel):
        y = kernel.times(x, dtype or x.dtype)
    else:
        y = contract("bi,io->bo", x, kernel.astype(x.dtype), dtype)
    return checkpoint_name(y, STORED)


def dense(kernel: AnyKernel) -> Float[Array, "..."]:
    """Returns the array that a kernel represents; an array is returned unchanged."""
    return kernel.dense() if isinstance(kernel, Kernel) else kernel


def is_kernel(x: object) -> bool:
    """Returns whether x is a `Kernel`, not an array."""
    return isinstance(x, Kernel)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedKernel(Kernel):
    """Kernel packed for decoding: Wᵀ split into equal parts [parts, rows, in_dim].

    Rows after the out_dim-th row are zero. A decoding step reads every weight, but processes only a
    few tokens. In the packed layout, the weights of one output are contiguous. With one part per
    core, XLA:CPU computes the parts in parallel, whereas a single product with few columns runs on
    one thread. A step of GPT-2 124M with batch size 8 took 38 ms with packed kernels and 77 ms with
    kernels [in_dim, out_dim] (two cores, one run, medians).
    """

    # The annotation is Any, because JAX also fills the fields with placeholders.
    parts: Any
    out_dim: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        return (*self.parts.shape[:-3], self.parts.shape[-1], self.out_dim)

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Computes x W. If x has at most FEW_ROWS rows, each part of W is multiplied separately.

        With more rows, one product with the whole W uses all cores. For 4,096 rows or more, this
        product is also necessary, because XLA:CPU of jaxlib 0.10.2 miscompiles the sequence norm →
        broadcast over the parts → batched product (docs/hazards.md).
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


# Kernels with fewer inputs are not packed. On two cores, a packed kernel was faster than a plain
# array with 512 inputs, but not with 128 inputs.
_PACKED_INPUTS = 384


def for_small_steps(kernel: AnyKernel, dtype: DTypeLike, parts: int) -> AnyKernel:
    """Converts a kernel to the layout for decoding, packed into `parts` parts in `dtype`.

    Packed kernels and int8 kernels are returned unchanged. A kernel with few inputs becomes a plain
    array in `dtype`. The product of a packed kernel must be transposed, and with few inputs the
    transposition takes as long as the product.
    """
    if isinstance(kernel, (PackedKernel, Int8Kernel)):
        return kernel
    if kernel.shape[-2] < _PACKED_INPUTS:
        return dense(kernel).astype(dtype)
    return pack(kernel, dtype, parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Kernel(Kernel):
    """Int8 kernel: W[i, o] ≈ values[o, i] · scale[o] + offset[o].

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
        """Computes x W; scale and offset are applied after the sums over inputs."""
        # The barrier keeps the conversion of the weights inside a decoding loop. Outside of the
        # loop, the conversion would make each step read four bytes per weight. GPT-2's logits would
        # then take 8.2 ms instead of 5.4 ms (`experiments/hazards.py`).
        values, x = jax.lax.optimization_barrier((self.values, x))
        if not at_most(x.shape[0], FEW_ROWS):
            rows = values.astype(x.dtype)
            sums = contract("bi,oi->bo", x, rows, jnp.float32)
        else:
            # XLA:CPU is slow at products of integers, and at products of operands that must be
            # converted first. In an elementwise product followed by a sum, the conversion costs no
            # time. A single row of x must not have a batch axis, because this axis made jaxlib
            # 0.10.2 take 20 to 40 times as long.
            x32 = x.astype(jnp.float32)
            x32 = x32[0] if len(x) == 1 else x32[:, None]
            sums = (values * x32).sum(axis=-1).reshape(len(x), -1)
        total = x.astype(jnp.float32).sum(axis=-1, keepdims=True)
        return (sums * self.scale + total * self.offset).astype(dtype)

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns the represented array."""
        return (self.values * self.scale[..., None] + self.offset[..., None]).mT


def quantize(kernel: Float[Array, "*layers in_dim out_dim"]) -> Int8Kernel:
    """Quantizes a kernel to 255 levels between the smallest and the largest weight per output.

    For each output o, scale = (max_i W[i, o] − min_i W[i, o]) / 254, or 1 if float32 cannot
    represent this step, and offset = (max + min) / 2. The error of a weight is at most scale / 2
    plus float32 rounding.
    """
    rows = kernel.astype(jnp.float32).mT
    least, most = rows.min(axis=-1), rows.max(axis=-1)
    offset = least / 2 + most / 2  # least + most could overflow.
    step = most / 254 - least / 254
    scale = jnp.where(step > 0, step, 1.0)
    values = jnp.round((rows - offset[..., None]) / scale[..., None])
    # If the weights differ by only a few float32 steps, the rounded offset may not be the middle
    # of their range, so values can exceed ±127.
    return Int8Kernel(jnp.clip(values, -127, 127).astype(jnp.int8), scale, offset)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Table:
    """Int8 table of vectors: table[v] ≈ values[v] · scale[v] + offset[v].

    The transpose of an `Int8Table` is an `Int8Kernel`.

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
        """Returns the table unchanged, because callers cast the vectors after the lookup."""
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
    """Quantizes a table, with a scale and an offset for each row."""
    kernel = quantize(table.mT)
    return Int8Table(kernel.values, kernel.scale, kernel.offset)
