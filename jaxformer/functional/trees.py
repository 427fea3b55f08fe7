"""Stacks of layers: their trees of arrays, and what their backward pass recomputes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxformer.functional.linear.products import STORED

Weights = Mapping[str, Any]
Initializers = dict[str, Callable[[PRNGKeyArray], Weights]]  # of the parts of a model, by name


def split_key(key: PRNGKeyArray | None, num: int) -> list[PRNGKeyArray | None]:
    """Splits `key` into `num` keys. Returns `[None] * num` if `key` is None."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def unstack(tree: Any, num_layers: int) -> list:
    """Splits a tree of stacked arrays into a list of one tree per layer; returns a list unchanged.

    Call this once before a decoding loop: slicing stacked weights inside the loop is slow.
    """
    if isinstance(tree, list):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    # The gradient of a split is one concatenation. That of an index is an array of zeros as large
    # as all layers.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    if not leaves:
        return [tree] * num_layers
    return [treedef.unflatten(leaf[0] for leaf in layer) for layer in zip(*split, strict=True)]


def stack_trees(tree: Any) -> Any:
    """Stacks a list of one tree per layer; the inverse of `unstack`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *tree) if isinstance(tree, list) else tree


def find_period(settings: Sequence[Any]) -> tuple[int, int]:
    """Returns (first, period): from `first` on, the settings repeat with that period.

    Of all such pairs it has the smallest sum.
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


# Values stored for the backward pass: all; only products with weights; only block inputs.
REMAT = {
    "none": lambda run, **_: run,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(STORED)),
    "full": jax.checkpoint,
}
