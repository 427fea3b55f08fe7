"""Checks the shapes and dtypes that a user's functions return."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.models.config.check import shown
from jaxformer.models.config.model import ModelConfig

Function = Callable[..., Any]


def check_functions(functions: Mapping[str, Function], config: ModelConfig) -> None:
    """Traces a user's functions with small inputs and checks their results.

    Args:
        functions: The functions, by field of the model: "mask", "activation" or "positions".
        config: The config of the model.

    Raises:
        ValueError: A function raises an error, or its result has a wrong shape or dtype.
    """
    checks = {"mask": _check_mask, "activation": _check_activation, "positions": _check_positions}
    for name, function in functions.items():
        checks[name](name, function, config)


def _check_activation(name: str, function: Function, config: ModelConfig) -> None:
    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    found = _trace(name, function, x)
    if found.shape != x.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        raise _wrong(name, function, found, "an array of float32 [2, 3]", "float [2, 3]")


def _check_positions(name: str, function: Function, config: ModelConfig) -> None:
    dim, positions = config.embed_dim, jax.ShapeDtypeStruct((3,), jnp.int32)
    found = _trace(name, function, positions, dim=dim)
    if found.shape != (3, dim) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise _wrong(name, function, found, "three positions", f"float [3, {dim}]")


def _check_mask(name: str, function: Function, config: ModelConfig) -> None:
    from jaxformer.functional.attention.masks import Mask

    if isinstance(function, Mask):  # A Mask may depend on segment ids.
        return
    queries, keys = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1), (1, 3)))
    found = _trace(name, function, queries, keys)
    axes = zip(found.shape, (2, 3), strict=False)
    fits = len(found.shape) == 2 and all(size in (1, whole) for size, whole in axes)
    if not fits or found.dtype != bool:
        raise _wrong(name, function, found, "positions [2, 1] and [1, 3]", "bool [2, 3]")


def _trace(
    name: str, function: Function, *inputs: jax.ShapeDtypeStruct, dim: int | None = None
) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a function's result; passes `dim` last if it is given."""
    static = () if dim is None else (dim,)

    def call(*arrays: jax.Array) -> jax.Array:
        return jnp.asarray(function(*arrays, *static))

    try:
        return jax.eval_shape(call, *inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(f"{name} {_spelled(function)} raised an error: {reason}") from error


def _wrong(
    name: str, function: Function, found: jax.ShapeDtypeStruct, given: str, accepted: str
) -> ValueError:
    returned = f"{found.dtype} [{', '.join(map(str, found.shape))}]"
    return ValueError(
        f"{name} {_spelled(function)} returns {returned} for {given}; it must return {accepted}"
    )


def _spelled(function: Function) -> str:
    """Returns MODULE:FUNCTION, or the representation of an object without a name."""
    name = getattr(function, "__qualname__", None)
    return shown(function) if name is None else f"{function.__module__}:{name}"
