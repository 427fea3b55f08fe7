"""Stacks of layers in the tree of a model's parameters."""

import jax

# The first axis of each array below these paths is the layer.
STACKS = ("blocks", "encoder/blocks")


def stack_of(path: tuple) -> str | None:
    """Returns the stack that holds a parameter; None if the parameter is of one layer.

    Args:
        path: the path of the parameter, as in `jax.tree_util.tree_map_with_path`.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((stack for stack in STACKS if name.startswith(f"{stack}/")), None)
