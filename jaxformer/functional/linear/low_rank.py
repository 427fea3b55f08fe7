"""Kernels with a low-rank update (LoRA, Hu et al. 2021), and concatenation of kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from jaxformer.functional.linear.kernels import AnyKernel, Int8Kernel, Kernel, dense, product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel(Kernel):
    """LoRA kernel: W + scale · A B with a frozen W and learned A and B.

    Attributes:
        frozen: W, any kernel; its gradient is zero.
        down: A [*layers, in_dim, rank].
        up: B [*layers, rank, out_dim].
        scale: factor of the update.
    """

    frozen: Any
    down: Any
    up: Any
    scale: float = field(default=1.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented array."""
        return self.frozen.shape

    def times(
        self, x: Float[Array, "rows in_dim"], dtype: DTypeLike
    ) -> Float[Array, "rows out_dim"]:
        """Computes x W + scale · (x A) B without forming A B."""
        frozen = jax.tree.map(jax.lax.stop_gradient, self.frozen)
        update = product(product(x, self.down), self.up, dtype)
        return product(x, frozen, dtype) + jnp.asarray(self.scale, dtype) * update

    def dense(self) -> Float[Array, "*layers in_dim out_dim"]:
        """Returns W + scale · A B."""
        return dense(self.frozen) + self.scale * (self.down @ self.up)


def is_low_rank(x: object) -> bool:
    """Returns whether x is a `LowRankKernel`."""
    return isinstance(x, LowRankKernel)


def init_low_rank(
    key: PRNGKeyArray, kernel: AnyKernel, rank: int, scale: float = 1.0
) -> LowRankKernel:
    """Adds a LoRA update with A ~ N(0, 1/in_dim) and B = 0; the initial update is therefore 0."""
    *layers, in_dim, out_dim = kernel.shape
    if not 1 <= rank <= min(in_dim, out_dim):
        raise ValueError(
            f"rank is {rank}; it must be in 1 … {min(in_dim, out_dim)} for a kernel of shape "
            f"[{in_dim}, {out_dim}]"
        )
    down = jax.random.normal(key, (*layers, in_dim, rank), jnp.float32) / in_dim**0.5
    return LowRankKernel(kernel, down, jnp.zeros((*layers, rank, out_dim), jnp.float32), scale)


def concatenate_kernels(kernels: Sequence[AnyKernel]) -> AnyKernel | None:
    """Concatenates kernels that have the same input, along their output axis.

    Returns None if the kernels have formats that cannot be combined. Subclasses of `Int8Kernel` and
    `LowRankKernel` are not concatenated, because they may define another product.
    """
    integers = [kernel for kernel in kernels if type(kernel) is Int8Kernel]
    if len(integers) == len(kernels):
        return Int8Kernel(
            jnp.concatenate([kernel.values for kernel in integers], axis=-2),
            jnp.concatenate([kernel.scale for kernel in integers], axis=-1),
            jnp.concatenate([kernel.offset for kernel in integers], axis=-1),
        )
    if any(type(kernel) is LowRankKernel for kernel in kernels):
        return _concatenated_updates(kernels)
    arrays = [kernel for kernel in kernels if not isinstance(kernel, Kernel)]
    return jnp.concatenate(arrays, axis=-1) if len(arrays) == len(kernels) else None


def _concatenated_updates(kernels: Sequence[AnyKernel]) -> LowRankKernel | None:
    """Concatenates kernels, some of which are `LowRankKernel`s.

    The joint update concatenates the matrices A of all kernels, and has their matrices B as
    diagonal blocks. The rank of the joint update is the sum of the kernels' ranks. Returns None if
    the updates have different scales, or if the frozen kernels cannot be concatenated.
    """
    updates = [kernel for kernel in kernels if type(kernel) is LowRankKernel]
    frozen = concatenate_kernels(
        [kernel.frozen if type(kernel) is LowRankKernel else kernel for kernel in kernels]
    )
    if frozen is None or len({kernel.scale for kernel in updates}) > 1:
        return None
    ends = np.cumsum([kernel.shape[-1] for kernel in kernels])
    rows = []
    for kernel, end in zip(kernels, ends, strict=True):
        if type(kernel) is LowRankKernel:
            sides = [(0, 0)] * (kernel.up.ndim - 1)
            places = (int(end) - kernel.shape[-1], int(ends[-1] - end))
            rows.append(jnp.pad(kernel.up, [*sides, places]))
    down = jnp.concatenate([kernel.down for kernel in updates], axis=-1)
    return LowRankKernel(frozen, down, jnp.concatenate(rows, axis=-2), updates[0].scale)
