"""Products of bfloat16 arrays on CPUs that multiply bfloat16.

XLA:CPU uses their instructions only if both operands are bfloat16, the result is float32, and the
rows of the left matrix are those of the result (docs/hazards.md). JAX's rules for gradients have
float32 operands, and its rules for vmap make products that XLA:CPU cannot compute. So `product` has
its own rules for both. It has no forward-mode derivative (jvp).
"""

from collections.abc import Callable
from functools import cache, partial
from string import ascii_uppercase

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> Float[Array, "*shape"]:
    """Computes an einsum of bfloat16 arrays with float32 sums, and rounds it to `dtype`.

    Args:
        formula: as of `products.contract`.
        dtype: the dtype of the result.
        x: the left operand.
        y: the right operand.
    """
    return _einsum(formula)(x, y).astype(dtype)


def _forward(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> tuple[Float[Array, "*shape"], tuple[Array, Array]]:
    return product(formula, dtype, x, y), (x, y)


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
        product(f"{result},{of_y}->{of_x}", cotangent.dtype, cotangent, y),
        product(f"{result},{of_x}->{of_y}", cotangent.dtype, cotangent, x),
    )


product.defvjp(_forward, _backward)


@cache
def _einsum(formula: str) -> Callable[[Array, Array], Array]:
    """Returns the einsum with a float32 result, which has its own rule for `jax.vmap`."""
    einsum = custom_vmap(partial(_plain_einsum, formula))
    einsum.def_vmap(partial(_batched_einsum, formula))
    return einsum


def _plain_einsum(formula: str, x: Array, y: Array) -> Array:
    inputs, _, result = formula.partition("->")
    pairs = zip(inputs.split(","), (x, y), strict=True)
    (left, x), (right, y) = sorted(pairs, key=lambda pair: result[:1] not in pair[0])
    if len(left) == len(result) == 2 and left[0] not in result:
        # The gradient of weights, "bi,bo->io". XLA:CPU converts both operands to float32 if the
        # left one has its rows in columns.
        left, x = left[::-1], _transposed(x)
    return jnp.einsum(f"{left},{right}->{result}", x, y, preferred_element_type=jnp.float32)


def _transposed(x: Array) -> Array:
    """Transposes a matrix in memory. XLA would merge a plain transposition with the product."""
    return jax.lax.optimization_barrier(x[:, :, None].swapaxes(0, 1)).reshape(x.shape[::-1])


def _batched_einsum(
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
        return _einsum(f"{of_x},{of_y}->{new}{result}")(x, y), True
    axis = names[side].index(own[0]) - len(names[side])
    length = operands[side].shape[axis]
    operands[side] = _join(operands[side], axis)
    joined = _einsum(formula)(*operands)
    return _split(joined, result.index(own[0]) - len(result), (size, length)), True


def _join(x: Array, axis: int) -> Array:
    """Joins axis 0 with a later one, counted from the end."""
    x = jnp.moveaxis(x, 0, axis - 1)
    return x.reshape(*x.shape[: axis - 1], x.shape[axis - 1] * x.shape[axis], *x.shape[axis:][1:])


def _split(x: Array, axis: int, sizes: tuple[int, int]) -> Array:
    """Undoes `_join`."""
    x = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis:][1:])
    return jnp.moveaxis(x, axis - 1, 0)
