"""Programs without a model: matrix products, memory, attention, and exchange between devices."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxformer.bench.measurement import MEASURED_DTYPES, DType, Measurement, Part, Rounds
from jaxformer.functional.attention.attend import chosen_kernel
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.dot_product import dot_product_attention
from jaxformer.functional.attention.masks import Causal, Mask
from jaxformer.functional.attention.platforms import fused_kernels
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.placement import OneDevice
from jaxformer.models.mesh import make_mesh, replicated

REPEATS = 4  # steps of one program, so that its start takes a small share of the time


def measure_ceilings(size: int, num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures matrix products, and copying and reading an array of float32.

    Copying adds 1 to each element. Reading sums each row, which writes almost nothing.

    Args:
        size: Rows and columns of the matrices.
        num_bytes: The size of the array, larger than the device's caches.
        rounds: How often each program is timed.
    """
    x = jnp.zeros((num_bytes // 4096, 1024), jnp.float32)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, x: x + 1, x))
    read = jax.jit(lambda x: x.sum(axis=-1))
    copied, summed = rounds.measure(lambda: copy(x), REPEATS), rounds.measure(lambda: read(x))
    shown = f"{x.nbytes / 1e6:,.0f} MB"
    return [
        *(_measure_product(size, dtype, rounds) for dtype in MEASURED_DTYPES),
        Measurement(Part.MEMORY, f"copy {shown}", "float32", copied, bytes=2 * x.nbytes),
        Measurement(Part.MEMORY, f"read {shown}", "float32", summed, bytes=x.nbytes),
    ]


def _measure_product(size: int, dtype: DType, rounds: Rounds) -> Measurement:
    """Measures the product of two matrices [size, size], at JAX's default precision.

    By default JAX multiplies float32 matrices with fewer bits on TPUs and on recent GPUs.
    """
    keys = jax.random.split(jax.random.key(0))
    # The product of a row with this matrix is about as large as the row: no overflow, no zeros.
    x, matrix = (jax.random.normal(key, (size, size), jnp.float32) for key in keys)
    x, matrix = x.astype(dtype), (matrix / size**0.5).astype(dtype)
    multiply = jax.jit(lambda x, y: jax.lax.fori_loop(0, REPEATS, lambda _, x: x @ y, x))
    timing = rounds.measure(lambda: multiply(x, matrix), REPEATS)
    return Measurement(Part.MATRIX, f"{size} × {size}", dtype, timing, 2 * size**3, 3 * x.nbytes)


class AttentionCase(NamedTuple):
    """Shapes of the queries, keys and values.

    Attributes:
        lengths: The lengths of the rows.
        tokens: Tokens of a batch; a batch has tokens / length rows, at least one.
        num_heads: The number of heads.
        head_dim: The width of a head.
    """

    lengths: tuple[int, ...]
    tokens: int
    num_heads: int
    head_dim: int


def implementation(query: Array, key: Array, value: Array, mask: Mask) -> str:
    """Returns the name of the implementation that attention="auto" selects for these arrays."""
    queries, keys = TokenInfo(query.shape[-2]), TokenInfo(key.shape[-2])
    context = Context(mask, queries, keys, placement=OneDevice(fused_kernels()))
    kernel = chosen_kernel(query, key, value, context)
    return "blockwise" if kernel is None else kernel.name


def causal_flops(rows: int, num_heads: int, length: int, head_dim: int) -> int:
    """Returns the operations of causal attention: scores and weighted sums of visible pairs."""
    return 4 * rows * num_heads * head_dim * (length * (length + 1) // 2)


def measure_attention(case: AttentionCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures causal attention of rows of each length.

    The gradients count twice the operations of the forward pass. Scores that the backward pass
    computes again do not count.

    Args:
        case: The shapes.
        dtype: The dtype of queries, keys and values.
        rounds: How often each program is timed.
    """

    def forward(*inputs: Array) -> Array:
        return dot_product_attention(*inputs, Causal())

    @jax.jit
    def both(cotangent: Array, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        output, pull_back = jax.vjp(forward, *inputs)
        return output, pull_back(cotangent)

    found = []
    for length in case.lengths:
        shape = (max(1, case.tokens // length), case.num_heads, length, case.head_dim)
        keys = jax.random.split(jax.random.key(0), 4)
        query, key, value, cotangent = (
            jax.random.normal(x, shape, "float32").astype(dtype) for x in keys
        )
        inputs = query, key, value
        # The forward pass reads q, k and v and writes o; the gradients add do, dq, dk and dv.
        flops, moved = causal_flops(*shape), 4 * cotangent.nbytes
        for name, program, times in (
            ("forward", partial(jax.jit(forward), *inputs), (1, 1)),
            ("+ backward", partial(both, cotangent, *inputs), (3, 2)),
        ):
            shown, timing = f"{shape[0]} × {length:,} tokens, {name}", rounds.measure(program)
            work = {"flops": times[0] * flops, "bytes": times[1] * moved}
            note = implementation(*inputs, Causal())
            found.append(Measurement(Part.ATTENTION, shown, dtype, timing, **work, note=note))
    return found


def programs(mesh: Mesh) -> dict[str, tuple[Callable, float]]:
    """Returns {name: (program, share)} for arrays [devices, size] whose rows are sharded.

    Each device sends the share of the whole array, in a ring: (n − 1) / n of it to gather it, and
    2 (n − 1) / n of a row to add up the rows.
    """
    n, jit = mesh.size, partial(jax.jit, out_shardings=replicated(mesh))
    return {
        "all-gather": (jit(lambda x: x), (n - 1) / n),
        "all-reduce": (jit(lambda x: x.sum(axis=0)), 2 * (n - 1) / n**2),
    }


def measure_collectives(num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures both collectives over all devices. The bytes are those that each device sends.

    Args:
        num_bytes: The size of the row of each device.
        rounds: How often each program is timed.
    """
    mesh = make_mesh({"fsdp": jax.device_count()})
    where = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jnp.ones((mesh.size, num_bytes // 4), jnp.float32, device=where)
    found = []
    for name, (program, share) in programs(mesh).items():
        shown, timing = f"{name} of {x.nbytes / 1e6:,.0f} MB", rounds.measure(partial(program, x))
        work = {"bytes": share * x.nbytes, "devices": mesh.size}
        found.append(Measurement(Part.COLLECTIVES, shown, "float32", timing, **work))
    return found
