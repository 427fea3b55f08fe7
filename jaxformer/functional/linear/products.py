"""Matrix products, with float32 sums for bfloat16 operands.

On CPUs with bfloat16 instructions, XLA:CPU uses these instructions only under three conditions
(docs/hazards.md): both operands are bfloat16, the result is float32, and the left operand is
contracted over its last axis. The gradients that JAX derives have float32 operands, and JAX's vmap
rule creates products that XLA:CPU cannot compute. Therefore `product` has a custom gradient and a
custom rule for vmap.
"""

from collections.abc import Callable
from functools import cache, partial
from string import ascii_letters
from types import CodeType

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, DTypeLike, Float

from jaxformer.functional.machine import gpu_generation, multiplies_bfloat16
from jaxformer.functional.own_gradient import own_gradient

# The name of the values that the remat policy "dots" stores for the backward pass.
STORED = "stored"


def contract(
    formula: str,
    x: Float[Array, "*x_shape"],
    y: Float[Array, "*y_shape"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*shape"]:
    """Computes an einsum of two arrays.

    Sums of bfloat16 products are float32, also in the two products that compute the gradients. If
    `jax.default_matmul_precision` is set, or if a library such as qwix has replaced `jnp.einsum`,
    `jnp.einsum` computes the product and its gradients.

    Args:
        formula: an einsum formula such as "bi,io->bo". Each index must occur in the result or in
            both operands.
        x: the left operand.
        y: the right operand.
        dtype: the dtype of the result.
    """
    dtype, algorithm = jnp.dtype(dtype or x.dtype), None
    if x.dtype == y.dtype == jnp.bfloat16 and not _is_overridden():
        if multiplies_bfloat16():
            return product(formula, dtype, x, y)
        if gpu_generation() >= 8:
            # The gradient of a float32 result is float32. With the algorithm BF16_BF16_F32, the
            # backward pass rounds this gradient to bfloat16, which GPUs multiply much faster. GPUs
            # before Ampere lack the algorithm, and XLA:CPU cannot compile it for small products.
            algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.einsum(formula, x, y, precision=algorithm, preferred_element_type=dtype)


def _is_overridden() -> bool:
    is_replaced = _identity(jnp.einsum) != _EINSUM
    return is_replaced or jax.default_matmul_precision.value is not None


def _identity(function: Callable[..., Array]) -> tuple[Callable[..., Array], CodeType | None]:
    # qwix replaces `jnp.einsum.__code__` and leaves the function object the same.
    return function, getattr(function, "__code__", None)


_EINSUM = _identity(jnp.einsum)


def product(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> Float[Array, "*shape"]:
    """Computes an einsum of bfloat16 arrays with float32 sums, and rounds it to `dtype`.

    Args:
        formula: see `contract`.
        dtype: the dtype of the result.
        x: the left operand.
        y: the right operand.

    Raises:
        ValueError: The formula does not contain "->".
    """
    return _product(_without_ellipsis(formula, x.ndim, y.ndim), dtype)(x, y)


def _without_ellipsis(formula: str, x_axes: int, y_axes: int) -> str:
    """Replaces the ellipsis of the formula by a letter for each axis."""
    inputs, arrow, result = formula.replace(" ", "").partition("->")
    if not arrow:
        raise ValueError(f'the formula "{formula}" must contain "->"')
    names, axes = inputs.split(","), (x_axes, y_axes)
    counts = [
        n - len(name) + 3 if "..." in name else 0 for name, n in zip(names, axes, strict=True)
    ]
    letters = "".join(i for i in reversed(ascii_letters) if i not in formula)[: max(counts)]
    names = [
        name.replace("...", letters[len(letters) - count :])
        for name, count in zip(names, counts, strict=True)
    ]
    return f"{','.join(names)}->{result.replace('...', letters)}"


@cache
def _product(formula: str, dtype: jnp.dtype) -> Callable[[Array, Array], Array]:
    """Returns the function (x, y) → product, which has a custom gradient."""

    @jax.custom_jvp
    def function(x: Array, y: Array) -> Array:
        return _einsum(formula)(x, y).astype(dtype)

    def in_float32(x: Array, y: Array) -> Array:
        x, y = (z.astype(jnp.float32) for z in (x, y))
        return jnp.einsum(formula, x, y).astype(dtype)

    # Forward mode uses `in_float32`. Reverse mode over forward mode transposes this function, and
    # JAX cannot transpose `_einsum`, which has a custom vmap rule. Plain einsum is correct here,
    # because XLA:CPU supports every order of the axes of float32 operands.
    function.defjvps(lambda dx, _, x, y: in_float32(dx, y), lambda dy, _, x, y: in_float32(x, dy))

    def forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
        return function(x, y), (x, y)

    return own_gradient(function, forward, partial(_backward, formula))


def _backward(
    formula: str, operands: tuple[Array, Array], cotangent: Float[Array, "*shape"]
) -> tuple[Float[Array, "*x_shape"], Float[Array, "*y_shape"]]:
    (x, y), cotangent = operands, cotangent.astype(jnp.bfloat16)
    of_x, of_y, result = _names(formula)
    return (
        _product(f"{result},{of_y}->{of_x}", cotangent.dtype)(cotangent, y),
        _product(f"{result},{of_x}->{of_y}", cotangent.dtype)(cotangent, x),
    )


def _names(formula: str) -> tuple[str, str, str]:
    """Returns the index letters of both operands and of the result of an einsum formula."""
    inputs, _, result = formula.partition("->")
    of_x, _, of_y = inputs.partition(",")
    return of_x, of_y, result


@cache
def _einsum(formula: str) -> Callable[[Array, Array], Array]:
    """Returns the function (x, y) → einsum in float32, which has a custom vmap rule."""
    einsum = custom_vmap(partial(_plain_einsum, formula))
    einsum.def_vmap(partial(_batched_einsum, formula))
    return einsum


def _plain_einsum(formula: str, x: Array, y: Array) -> Array:
    of_x, of_y, result = _names(formula)
    own = [i for i in result if (i in of_x) != (i in of_y)]
    if own and own[0] in of_y:  # The left operand must have the rows of the result.
        of_x, of_y, x, y = of_y, of_x, y, x
    contracted = [i for i in of_x if i not in result]
    if len(contracted) == 1 and of_x[-1] in own:
        # Without this transposition, XLA:CPU would convert both operands to float32, for example in
        # "bi,bo->io", the gradient of weights.
        order = of_x.replace(contracted[0], "") + contracted[0]
        of_x, x = order, _transposed(x, tuple(map(of_x.index, order)))
    return jnp.einsum(f"{of_x},{of_y}->{result}", x, y, preferred_element_type=jnp.float32)


def _transposed(x: Array, axes: tuple[int, ...]) -> Array:
    """Transposes x in memory, because XLA would fuse a plain transposition with the product."""
    moved = jax.lax.optimization_barrier(x[..., None].transpose(*axes, x.ndim))
    return moved.reshape(moved.shape[:-1])


def _batched_einsum(
    formula: str, size: int, is_batched: list[bool], x: Array, y: Array
) -> tuple[Array, bool]:
    """Computes the einsum for operands with a batch axis 0, as the vmap rule of `_einsum`.

    XLA:CPU cannot compute some products of JAX's own rule, such as "nbo,bi->nio" with batch axis n.
    If only one operand has the batch axis n, the function merges n with an axis o that the other
    operand lacks. The formula of the einsum remains the same, and the function splits the merged
    axis of the result.
    """
    *names, result = _names(formula)
    operands = [x, y]
    side = is_batched.index(True)
    own = [i for i in names[side] if i in result and i not in names[1 - side]]
    if all(is_batched) or not own:
        new = next(i for i in ascii_letters if i not in formula)
        of_x, of_y = (new * batched + name for batched, name in zip(is_batched, names, strict=True))
        return _einsum(f"{of_x},{of_y}->{new}{result}")(x, y), True
    axis = names[side].index(own[0])
    length = operands[side].shape[1 + axis]
    operands[side] = _join(operands[side], axis)
    joined = _einsum(formula)(*operands)
    return _split(joined, result.index(own[0]), (size, length)), True


def _join(x: Array, axis: int) -> Array:
    """Merges axis 0 into the axis with index `axis` among the remaining axes."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x: Array, axis: int, sizes: tuple[int, int]) -> Array:
    """Splits the axis that `_join` has merged."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), axis, 0)
