"""Trees of stacked weights, and rematerialization policies."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxformer.functional.linear.products import STORED

Weights = Mapping[str, Any]
# {name of a part of a model: function that initializes its weights from a random key}.
Initializers = dict[str, Callable[[PRNGKeyArray], Weights]]


def split_key(key: PRNGKeyArray | None, num: int) -> list[PRNGKeyArray | None]:
    """Splits `key` into `num` keys. Returns `[None] * num` if `key` is None."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def unstack(tree: Any, num_layers: int) -> list:
    """Splits a tree of stacked arrays into one tree per layer; returns a list unchanged.

    Call this once before a decoding loop, because slicing stacked weights inside the loop is slow.
    """
    if isinstance(tree, list):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    # The gradient of a split is one concatenation. The gradient of indexing would write an array of
    # zeros as large as all layers.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    if not leaves:
        return [tree] * num_layers
    return [treedef.unflatten(leaf[0] for leaf in layer) for layer in zip(*split, strict=True)]


def stack_trees(tree: Any) -> Any:
    """Stacks a list of one tree per layer; the inverse of `unstack`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *tree) if isinstance(tree, list) else tree


def find_period(settings: Sequence[Any]) -> tuple[int, int]:
    """Returns (first, period), where settings[i + period] == settings[i] for all i ≥ first.

    If several pairs satisfy this, the function returns the pair with the smallest first + period.
    """
    num = len(settings)
    return min(
        (
            (first, period)
            for first in range(num)
            for period in range(1, num - first + 1)
            if all(settings[i] == settings[i - period] for i in range(first + period, num))
        ),
        key=sum,
    )


# For the backward pass, "none" stores all values, "dots" stores only products with weights, and
# "full" stores only the inputs of blocks.
REMAT = {
    "none": lambda run, **_: run,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(STORED)),
    "full": jax.checkpoint,
}
