"""The layout of a cache inside a compiled loop."""

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxformer.functional.cache.key_values import Cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopCache:
    """The arrays of a cache without axes of size 1 for batch elements and heads.

    XLA:CPU updates keys and values in place only without such axes: with them, the steps of one row
    of GPT-2 124M took 9 % longer (jaxlib 0.10, two cores).

    Attributes:
        arrays: the arrays of the cache.
        structure: the cache's tree and the shape of each array.
    """

    arrays: list[jax.Array]
    structure: tuple[Any, tuple[tuple[int, ...], ...]] = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: Cache) -> "LoopCache":
        """Returns the loop's form of a cache, for the carry of a `scan` or a `while_loop`."""
        leaves, tree = jax.tree.flatten(cache)
        return cls(
            [_without_single_axes(x) for x in leaves], (tree, tuple(x.shape for x in leaves))
        )

    def restored(self) -> Cache:
        """Returns the cache."""
        tree, shapes = self.structure
        return tree.unflatten(x.reshape(n) for x, n in zip(self.arrays, shapes, strict=True))


def _without_single_axes(x: jax.Array) -> jax.Array:
    return x.reshape([n for n in x.shape[:2] if n != 1] + list(x.shape[2:])) if x.ndim == 4 else x
