"""A stack of layers: run one after the other, and what a pass through them gives."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Forward(NamedTuple):
    """What a pass gives. hidden: [batch, length, dim], what the head is applied to; captured: what
    passed through the points that were asked for, the layer as the first axis of those inside the
    layers; cache: the one after these tokens, None where none was given."""

    hidden: Any
    captured: dict
    cache: Any = None


def split_key(key, num: int):
    """So many keys of one; None for each where there is none."""
    return [None] * num if key is None else jax.random.split(key, num)


def unstack(tree, num_layers: int) -> list:
    """What each layer has of a tree of stacked arrays; a list of trees, one a layer, as it is.

    Done once outside a decoding loop, it saves the slicing inside.
    """
    if isinstance(tree, list):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    # Going back, a split is one concatenation; an index would be zeros as large as all layers.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    if not leaves:
        return [tree] * num_layers
    return [treedef.unflatten(leaf[0] for leaf in layer) for layer in zip(*split, strict=True)]


def stack(tree):
    """The inverse of `unstack`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *tree) if isinstance(tree, list) else tree


def over_layers(step, x, layers, config, execution, *, few_tokens: bool = False):
    """x through all layers, by scan or unrolled: (y, the output of each layer).

    step(x, layer) → (x, output) runs one of them; layers: a tuple of trees that are stacked, or
    lists of a tree a layer. few_tokens: a step of decoding, which is always fastest unrolled.
    """
    num_layers = config.num_layers
    scanned = execution.scans(num_layers, few_tokens)
    # In a scan the two passes are loops of their own: nothing need keep them from being merged.
    step = REMAT[execution.remat](step, prevent_cse=not scanned)
    if scanned:
        x, outputs = jax.lax.scan(step, x, tuple(map(stack, layers)))
        return x, unstack(outputs, num_layers)
    outputs = []
    for layer in zip(*(unstack(part, num_layers) for part in layers), strict=True):
        x, output = step(x, layer)
        outputs.append(output)
    return x, outputs


# What the backward pass finds in memory: everything; matrix products only; block inputs only.
REMAT = {
    "none": lambda run, **_: run,
    "dots": partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}
