"""Ceilings of a device: operations per second of a matrix product, bytes per second of memory."""

import jax
import jax.numpy as jnp

from jaxformer.bench.measurement import MATRIX, MEASURED_DTYPES, MEMORY, DType, Measurement
from jaxformer.bench.timing import Rounds

REPEATS = 4  # steps of one program, so that its start takes a small share of the time


def measure_ceilings(sizes: dict[str, int], num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures matrix products of these sizes by dtype, and memory with an array of these bytes."""
    products = (measure_product(sizes[dtype], dtype, rounds) for dtype in MEASURED_DTYPES)
    return [*products, *measure_memory(num_bytes, rounds)]


def measure_product(size: int, dtype: DType, rounds: Rounds) -> Measurement:
    """Measures the product of two matrices [size, size], at JAX's default precision.

    By default JAX multiplies float32 matrices with fewer bits on TPUs and on recent GPUs.

    Args:
        size: Rows and columns of each matrix.
        dtype: The dtype of the matrices and of their product.
        rounds: How often the product is timed.
    """
    keys = jax.random.split(jax.random.key(0))
    # The product of a row with this matrix is about as large as the row: no overflow, no zeros.
    x, matrix = (jax.random.normal(key, (size, size), jnp.float32) for key in keys)
    x, matrix = x.astype(dtype), (matrix / size**0.5).astype(dtype)
    multiply = jax.jit(lambda x, y: jax.lax.fori_loop(0, REPEATS, lambda _, x: x @ y, x))
    timing = rounds.measure(lambda: multiply(x, matrix), REPEATS)
    moved = 3 * x.nbytes
    return Measurement(MATRIX, f"{size} × {size}", dtype, timing, 2 * size**3, moved)


def measure_memory(num_bytes: int, rounds: Rounds) -> list[Measurement]:
    """Measures copying and reading an array of float32.

    Copying adds 1 to each element. Reading sums each row, which writes almost nothing.

    Args:
        num_bytes: The size of the array, larger than the device's caches.
        rounds: How often each program is timed.
    """
    x = jnp.zeros((num_bytes // 4096, 1024), jnp.float32)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, x: x + 1, x))
    read = jax.jit(lambda x: x.sum(axis=-1))
    copied = rounds.measure(lambda: copy(x), REPEATS)
    summed = rounds.measure(lambda: read(x))
    size = f"{x.nbytes / 1e6:,.0f} MB"
    return [
        Measurement(MEMORY, f"copy {size}", "float32", copied, bytes=2 * x.nbytes),
        Measurement(MEMORY, f"read {size}", "float32", summed, bytes=x.nbytes),
    ]
