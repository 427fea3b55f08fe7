"""Products of arrays, with float32 sums where the operands are bfloat16."""

from collections.abc import Callable
from types import CodeType

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxformer.functional.linear.bfloat16_products import product
from jaxformer.functional.machine import gpu_generation, multiplies_bfloat16

STORED = "stored"  # the name of values that remat policy "dots" stores for the backward pass


def contract(
    formula: str,
    x: Float[Array, "*x_shape"],
    y: Float[Array, "*y_shape"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*shape"]:
    """Computes an einsum of two arrays; returns `dtype` (None: that of x).

    Sums of bfloat16 products are float32, in the two products that compute the gradients too. If
    `jax.default_matmul_precision` is set or a library such as qwix has replaced `jnp.einsum`, the
    products and their gradients are those of `jnp.einsum`.

    Args:
        formula: such as "bi,io->bo". Each index occurs in the result or in both operands.
        x: the left operand.
        y: the right operand.
        dtype: the dtype of the result.
    """
    dtype, algorithm = jnp.dtype(dtype or x.dtype), None
    if x.dtype == y.dtype == jnp.bfloat16 and not _is_overridden():
        if multiplies_bfloat16():
            return product(formula, dtype, x, y)
        if gpu_generation() >= 8:
            # If the result is float32, its gradient is too. With this algorithm the products with
            # it round it to bfloat16, which a GPU multiplies much faster. GPUs before Ampere lack
            # the algorithm, and XLA:CPU cannot compile it for small products.
            algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.einsum(formula, x, y, precision=algorithm, preferred_element_type=dtype)


def _is_overridden() -> bool:
    is_replaced = _identity(jnp.einsum) != _EINSUM
    return is_replaced or jax.default_matmul_precision.value is not None


def _identity(function: Callable[..., Array]) -> tuple[Callable[..., Array], CodeType | None]:
    return function, getattr(function, "__code__", None)  # qwix replaces the code


_EINSUM = _identity(jnp.einsum)
