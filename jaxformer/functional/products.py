"""Products of arrays, with float32 sums where the operands are bfloat16."""

from collections.abc import Callable
from functools import cache, partial
from string import ascii_uppercase

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, DTypeLike, Float

from jaxformer.functional.machine import gpu_generation, multiplies_bfloat16

STORED = "stored"  # the name of values that remat policy "dots" stores for the backward pass


def contract(
    formula: str,
    x: Float[Array, "*x_shape"],
    y: Float[Array, "*y_shape"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*shape"]:
    """Computes an einsum of two arrays; returns `dtype` (None: that of x).

    Sums of bfloat16 products are float32, in the two products that compute the gradients too. Where
    `jax.default_matmul_precision` is set, products and gradients are JAX's own.

    Args:
        formula: such as "bi,io->bo". Each index occurs in the result or in both operands.
        x: the left operand.
        y: the right operand.
        dtype: the dtype of the result.
    """
    dtype, algorithm = jnp.dtype(dtype or x.dtype), None
    is_default = jax.default_matmul_precision.value is None
    if is_default and x.dtype == y.dtype == jnp.bfloat16:
        if multiplies_bfloat16():
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
    """Computes `contract` for a CPU that multiplies bfloat16 numbers.

    XLA does so only for bfloat16 operands and a float32 result (docs/hazards.md). JAX's rule for
    gradients has float32 operands, so this function has its own rule. It has no forward-mode
    derivative (jvp).
    """
    return _product(formula)(x, y).astype(dtype)


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


@cache
def _product(formula: str) -> Callable[[Array, Array], Array]:
    """Returns the einsum with a float32 result, which has its own rule for `jax.vmap`."""
    product = custom_vmap(
        lambda x, y: jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)
    )
    product.def_vmap(partial(_batched_product, formula))
    return product


def _batched_product(
    formula: str, size: int, is_batched: list[bool], x: Array, y: Array
) -> tuple[Array, bool]:
    """Computes the einsum of operands with a batch axis, and whether the result has one.

    XLA:CPU cannot compute some products of JAX's rule, such as "nbo,bi->nio" with batch axis n.
    Here the axis joins an index of the operand: n·o is one index, and the formula does not change.
    """
    inputs, _, result = formula.partition("->")
    names, operands = inputs.split(","), [x, y]
    side = is_batched.index(True)
    own = [i for i in names[side] if i.isalpha() and i in result and i not in names[1 - side]]
    if all(is_batched) or not own:
        new = next(i for i in ascii_uppercase if i not in formula)
        of_x, of_y = (new * batched + name for batched, name in zip(is_batched, names, strict=True))
        return _product(f"{of_x},{of_y}->{new}{result}")(x, y), True
    axis = names[side].index(own[0]) - len(names[side])
    length = operands[side].shape[axis]
    operands[side] = _join(operands[side], axis)
    product = _product(formula)(*operands)
    return _split(product, result.index(own[0]) - len(result), (size, length)), True


def _join(x: Array, axis: int) -> Array:
    """Joins axis 0 with a later one, counted from the end."""
    x = jnp.moveaxis(x, 0, axis - 1)
    return x.reshape(*x.shape[: axis - 1], x.shape[axis - 1] * x.shape[axis], *x.shape[axis:][1:])


def _split(x: Array, axis: int, sizes: tuple[int, int]) -> Array:
    """Undoes `_join`."""
    x = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis:][1:])
    return jnp.moveaxis(x, axis - 1, 0)
