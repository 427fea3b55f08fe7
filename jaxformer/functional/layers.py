"""A stack of layers: run one after the other, and what a pass through them gives."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.spread import EXCHANGED, spread


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


def over_layers(step, x, layers, settings, execution, *, decodes=False, few_tokens=False):
    """x through all layers, by scan or unrolled: (y, the output of each layer).

    step(setting, x, layer) → (x, output) runs one of them; layers: a tuple of trees that are
    stacked, or lists of a tree a layer; settings: what is static in each, a hashable value a layer.
    A scan goes by their period. decodes: a pass over a cache, always inside a compiled program: a
    layer is traced once for each setting, which outside of one would compile it at every call.
    few_tokens: a step of decoding, which is always fastest unrolled.
    """
    num_layers, x = len(settings), spread(x)
    scanned = execution.scans(num_layers, few_tokens)
    traced = jax.jit if decodes else lambda run: run
    # In a scan the two passes are loops of their own: nothing need keep them from being merged.
    steps = {
        setting: traced(REMAT[execution.remat](partial(step, setting), prevent_cse=not scanned))
        for setting in dict.fromkeys(settings)
    }

    def run(x, settings, layers):
        outputs = []
        for setting, *layer in zip(settings, *layers, strict=True):
            x, output = steps[setting](x, tuple(layer))
            x = spread(x)
            outputs.append(output)
        return x, outputs

    layers = [unstack(part, num_layers) if not scanned else stack(part) for part in layers]
    if not scanned:
        return run(x, settings, layers)
    first, period = repeated(settings)
    last = num_layers - (num_layers - first) % period

    def one_period(x, layers):
        layers = [unstack(tree, period) for tree in layers]
        x, outputs = run(x, settings[first : first + period], layers)
        return x, stack(outputs)

    def run_part(x, start, stop):
        """Those before and after what repeats, one by one."""
        if start == stop:
            return x, []
        part = jax.tree.map(lambda leaf: leaf[start:stop], layers)
        return run(x, settings[start:stop], [unstack(tree, stop - start) for tree in part])

    def by_period(leaf):
        return leaf[first:last].reshape(-1, period, *leaf.shape[1:])

    x, before = run_part(x, 0, first)
    x, outputs = jax.lax.scan(one_period, x, jax.tree.map(by_period, layers))
    outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
    x, after = run_part(x, last, num_layers)
    return x, [*before, *unstack(outputs, last - first), *after]


def repeated(settings) -> tuple[int, int]:
    """(first, period): from `first` on they repeat with that period; the two as small as can be."""
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


_KEPT = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(EXCHANGED),
)
# What the backward pass finds in memory: everything; matrix products only; block inputs only.
REMAT = {
    "none": lambda run, **_: run,
    "dots": partial(jax.checkpoint, policy=_KEPT),
    "full": jax.checkpoint,
}
