"""Products of arrays, with float32 sums where the operands are bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from jaxformer.functional.machine import gpu_generation, has_matrix_units

STORED = "stored"  # the name of values that remat policy "dots" stores for the backward pass


def contract(
    formula: str,
    x: Float[Array, "*x_shape"],
    y: Float[Array, "*y_shape"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*shape"]:
    """Computes an einsum of two arrays; returns `dtype` (None: that of x).

    Sums of bfloat16 products are float32, in the two products that compute the gradients too.

    Args:
        formula: such as "bi,io->bo". Each index occurs in the result or in both operands.
        x: the left operand.
        y: the right operand.
        dtype: the dtype of the result.
    """
    dtype, algorithm = jnp.dtype(dtype or x.dtype), None
    if x.dtype == y.dtype == jnp.bfloat16:
        if has_matrix_units():
            return _with_float32_sums(formula, dtype, x, y)
        if gpu_generation() >= 8:
            # If the result is float32, its gradient is too. With this algorithm the products with
            # it round it to bfloat16, which a GPU multiplies much faster. GPUs before Ampere lack
            # the algorithm, and XLA:CPU cannot compile it for small products.
            algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.einsum(formula, x, y, precision=algorithm, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_float32_sums(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> Float[Array, "*shape"]:
    """Computes `contract` for a CPU with matrix units.

    XLA uses them only for bfloat16 operands and a float32 result (docs/hazards.md). JAX's rule for
    gradients has float32 operands, so this function has its own rule. It has no forward-mode
    derivative (jvp).
    """
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32).astype(dtype)


def _forward(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> tuple[Float[Array, "*shape"], tuple[Array, Array]]:
    return _with_float32_sums(formula, dtype, x, y), (x, y)


def _backward(
    formula: str,
    dtype: jnp.dtype,
    operands: tuple[Array, Array],
    cotangent: Float[Array, "*shape"],
) -> tuple[Float[Array, "*x_shape"], Float[Array, "*y_shape"]]:
    (x, y), cotangent = operands, cotangent.astype(jnp.bfloat16)
    inputs, _, result = formula.partition("->")
    of_x, _, of_y = inputs.partition(",")
    return (
        contract(f"{result},{of_y}->{of_x}", cotangent, y),
        contract(f"{result},{of_x}->{of_y}", cotangent, x),
    )


_with_float32_sums.defvjp(_forward, _backward)
