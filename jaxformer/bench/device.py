"""Benchmarks without a model: matrix products, memory, attention and collectives."""

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
from jaxformer.models.sharding.parameters import make_mesh, replicated

# A program repeats a copy or a matrix product this number of times, so that the start of the
# program is a small part of its time.
REPEATS = 4


def measure_ceilings(size: int, num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures matrix products, and the memory bandwidth of copying and reading float32 arrays.

    To measure copying, a program adds 1 to each element of an array. To measure reading, a program
    sums each row of the array, which writes almost nothing.

    Args:
        size: The number of rows and columns of the matrices.
        num_bytes: The size of the array, larger than the device's caches.
        rounds: The limits on the timed rounds of each program.
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
    """Measures the product of two matrices [size, size] at JAX's default precision.

    On TPUs and recent GPUs, the default precision for float32 matrices is lower than float32.
    """
    keys = jax.random.split(jax.random.key(0))
    # `matrix` is divided by √size, so that the values of repeated products keep their size.
    x, matrix = (jax.random.normal(key, (size, size), jnp.float32) for key in keys)
    x, matrix = x.astype(dtype), (matrix / size**0.5).astype(dtype)
    multiply = jax.jit(lambda x, y: jax.lax.fori_loop(0, REPEATS, lambda _, x: x @ y, x))
    timing = rounds.measure(lambda: multiply(x, matrix), REPEATS)
    return Measurement(Part.MATRIX, f"{size} × {size}", dtype, timing, 2 * size**3, 3 * x.nbytes)


class AttentionCase(NamedTuple):
    """Shapes of the queries, keys and values.

    Attributes:
        lengths: The sequence lengths.
        tokens: The tokens per batch. The batch size is tokens / length, but at least 1.
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


def causal_flops(batch_size: int, num_heads: int, length: int, head_dim: int) -> int:
    """Returns the FLOPs of causal attention.

    Only the scores and the weighted sums are counted, for the pairs of a query and a key that the
    causal mask allows.
    """
    return 4 * batch_size * num_heads * head_dim * (length * (length + 1) // 2)


def measure_attention(case: AttentionCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures causal attention for each sequence length.

    The backward pass counts as twice the FLOPs of the forward pass. If the backward pass recomputes
    attention scores, the FLOPs of the recomputation are not counted.

    Args:
        case: The shapes.
        dtype: The dtype of queries, keys and values.
        rounds: The limits on the timed rounds of each program.
    """

    def forward(query: Array, key: Array, value: Array) -> Array:
        return dot_product_attention(query, key, value, Causal())

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
        # The forward pass reads the queries, keys and values, and writes the outputs. The program
        # with gradients also reads or writes the gradients of these four arrays.
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
    """Returns {name: (program, fraction of an array that each device sends)}.

    The array [devices, size] has one row per device. The fraction is the number of bytes that each
    of n devices sends in a ring, divided by the bytes of the array. An all-gather sends (n − 1) / n
    of the array. An all-reduce sums the rows and sends 2 (n − 1) / n of the bytes of a row.
    """
    n, jit = mesh.size, partial(jax.jit, out_shardings=replicated(mesh))
    return {
        "all-gather": (jit(lambda x: x), (n - 1) / n),
        "all-reduce": (jit(lambda x: x.sum(axis=0)), 2 * (n - 1) / n**2),
    }


def measure_collectives(num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures an all-gather and an all-reduce over all devices, and the bytes each device sends.

    Args:
        num_bytes: The size in bytes of one row of the exchanged array. Each device has one row.
        rounds: The limits on the timed rounds of each program.
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
