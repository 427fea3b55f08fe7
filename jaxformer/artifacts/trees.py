"""Trees of parameters: leaves by path, their differences, and unused leaves of earlier versions."""

import warnings
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

_FORMER = (
    "*cross_attention/query_norm/*",
    "*cross_attention/key_norm/*",
    "*blocks/attention_norm/*",  # of a single layer without first_attention_norm
)


def flat_shapes(tree) -> dict:
    """Returns the shapes of a tree's leaves by their paths."""
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def flat(tree: dict) -> dict:
    """Returns the leaves by their paths, such as "blocks/attention/query/kernel"."""
    return flatten_dict(tree, sep="/")


def filled(tree: dict, leaves: dict) -> dict:
    """Returns the tree with the leaves of `leaves`, which are by path: the inverse of `flat`."""
    return unflatten_dict(flatten_dict(tree, keep_empty_nodes=True, sep="/") | leaves, sep="/")


def with_former(like, found):
    """Returns `like`, extended by unused leaves that an earlier version stored, and their paths.

    The extension is needed because Orbax restores whole trees only.
    """
    shapes = {
        _name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
        if hasattr(leaf, "shape")
    }
    former = former_parameters(shapes, leaf_types(like))

    def extended(path, node):
        prefix = f"{_name(path)}/" if path else ""
        for name in former:
            if name.startswith(prefix) and isinstance(node, dict):
                node = _inserted(node, name.removeprefix(prefix).split("/"), shapes[name])
        return node

    return jax.tree_util.tree_map_with_path(extended, like, is_leaf=_is_params), former


def without_former(tree, like):
    """Removes the leaves that `with_former` added."""

    def pruned(like, tree):
        if not isinstance(like, dict):
            return tree
        return {name: pruned(branch, tree[name]) for name, branch in like.items()}

    return jax.tree.map(pruned, like, tree, is_leaf=_is_params)


def _is_params(node) -> bool:
    """Returns whether a node has the form of a model's parameters, as moments and averages do."""
    return isinstance(node, dict) and "blocks" in node


def _inserted(tree: dict, keys: list[str], leaf) -> dict:
    key, *rest = keys
    return {**tree, key: _inserted(tree.get(key, {}), rest, leaf) if rest else leaf}


def not_finite(tree) -> str | None:
    """Returns the path of the first array that holds NaN or an infinity, or None."""
    leaves = {
        _name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    are_finite = jax.device_get(_are_finite(list(leaves.values())))
    return next((name for name, x in zip(leaves, are_finite, strict=True) if not x), None)


@jax.jit
def _are_finite(leaves: list) -> list:
    """Returns, for each array, whether all its values are finite.

    It runs on the devices of the arrays, since a process may hold only parts of them.
    """
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def as_shapes(tree):
    """Returns the tree with a jax.ShapeDtypeStruct, with a sharding, for each array.

    An array without a sharding in `tree` is placed on one device, whatever sharding it was saved
    with.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x):
        where = getattr(x, "sharding", None) or one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


def check_equal(where, stored, wanted) -> None:
    """Raises ValueError naming the first leaf that differs in presence, shape or dtype."""
    stored, wanted = leaf_types(stored), leaf_types(wanted)
    for name in sorted(stored.keys() | wanted.keys()):
        a, b = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise ValueError(f"{where} does not fit this model: {name} is {a}, expected {b}")


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_types(tree) -> dict[str, str]:
    """Returns the dtype and the shape of each array of a tree, as text, by its path."""
    return {
        _name(path): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape") and not isinstance(leaf, np.generic)
    }


def former_parameters(found: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Returns the stored paths of unused parameters that an earlier version created.

    Args:
        found: Paths of the stored parameters.
        wanted: Paths of the model's parameters.
    """
    return sorted(
        path
        for path in set(found) - set(wanted)
        if any(fnmatchcase(path, pattern) for pattern in _FORMER)
    )


def warn_of_former(where, paths: Collection[str]) -> None:
    """Warns that the unused parameters of these paths are dropped; `where` names the file."""
    if paths:
        warnings.warn(
            f"{where}: {len(paths)} parameters of an earlier version are unused and were dropped "
            f"({', '.join(paths)})",
            stacklevel=3,
        )
