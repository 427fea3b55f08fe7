"""Products of arrays, with float32 sums where the operands are bfloat16.

On CPUs with instructions for bfloat16, XLA:CPU uses them only if both operands are bfloat16, the
result is float32, and the left operand is contracted over its last axis (docs/hazards.md). JAX's
gradients have float32 operands, and its vmap makes products that XLA:CPU cannot compute. So
`product` has its own gradient and its own rule for vmap.
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


def product(
    formula: str, dtype: jnp.dtype, x: Float[Array, "*x_shape"], y: Float[Array, "*y_shape"]
) -> Float[Array, "*shape"]:
    """Computes an einsum of bfloat16 arrays with float32 sums, and rounds it to `dtype`.

    Args:
        formula: as of `products.contract`.
        dtype: the dtype of the result.
        x: the left operand.
        y: the right operand.

    Raises:
        ValueError: the formula has no "->".
    """
    return _product(_without_ellipsis(formula, x.ndim, y.ndim), dtype)(x, y)


def _without_ellipsis(formula: str, x_axes: int, y_axes: int) -> str:
    """Returns the formula with a letter for each axis."""
    inputs, arrow, result = formula.replace(" ", "").partition("->")
    if not arrow:
        raise ValueError(f'the formula "{formula}" must have a "->"')
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
    """Returns the product with its own gradient."""

    @jax.custom_jvp
    def function(x: Array, y: Array) -> Array:
        return _einsum(formula)(x, y).astype(dtype)

    def in_float32(x: Array, y: Array) -> Array:
        x, y = (z.astype(jnp.float32) for z in (x, y))
        return jnp.einsum(formula, x, y).astype(dtype)

    # JAX cannot transpose a function with its own rule for `jax.vmap`, as reverse mode over forward
    # mode requires. XLA:CPU computes products of float32 in every order of axes.
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
    """Returns the indices of both operands and of the result."""
    inputs, _, result = formula.partition("->")
    of_x, _, of_y = inputs.partition(",")
    return of_x, of_y, result


@cache
def _einsum(formula: str) -> Callable[[Array, Array], Array]:
    """Returns the einsum with a float32 result, which has its own rule for `jax.vmap`."""
    einsum = custom_vmap(partial(_plain_einsum, formula))
    einsum.def_vmap(partial(_batched_einsum, formula))
    return einsum


def _plain_einsum(formula: str, x: Array, y: Array) -> Array:
    of_x, of_y, result = _names(formula)
    own = [i for i in result if (i in of_x) != (i in of_y)]
    if own and own[0] in of_y:  # y has the rows of the result, so it is the left operand
        of_x, of_y, x, y = of_y, of_x, y, x
    contracted = [i for i in of_x if i not in result]
    if len(contracted) == 1 and of_x[-1] in own:
        # As in the gradient of weights, "bi,bo->io". XLA:CPU would convert both to float32.
        order = of_x.replace(contracted[0], "") + contracted[0]
        of_x, x = order, _transposed(x, tuple(map(of_x.index, order)))
    return jnp.einsum(f"{of_x},{of_y}->{result}", x, y, preferred_element_type=jnp.float32)


def _transposed(x: Array, axes: tuple[int, ...]) -> Array:
    """Transposes in memory. XLA would merge a plain transposition with the product."""
    moved = jax.lax.optimization_barrier(x[..., None].transpose(*axes, x.ndim))
    return moved.reshape(moved.shape[:-1])


def _batched_einsum(
    formula: str, size: int, is_batched: list[bool], x: Array, y: Array
) -> tuple[Array, bool]:
    """Computes the einsum where one or both operands have a batch axis 0; the result has one.

    XLA:CPU cannot compute some products of JAX's rule, such as "nbo,bi->nio" with batch axis n.
    Here n is merged with an axis o that only this operand has, so the formula stays the same. The
    axis of the result is split again.
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
    """Joins axis 0 with the one that is `axis` without it."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x: Array, axis: int, sizes: tuple[int, int]) -> Array:
    """Undoes `_join`."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), axis, 0)
