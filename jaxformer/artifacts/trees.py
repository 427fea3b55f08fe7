"""Trees of parameters: leaves by path, and their differences."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict


def flat_shapes(tree: dict) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree's leaves by their paths."""
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def flat(tree: dict) -> dict:
    """Returns the leaves by their paths, such as "blocks/attention/query/kernel"."""
    return flatten_dict(tree, sep="/")


def filled(tree: dict, leaves: dict) -> dict:
    """Returns the tree with the leaves of `leaves`, which are by path: the inverse of `flat`."""
    return unflatten_dict(flatten_dict(tree, keep_empty_nodes=True, sep="/") | leaves, sep="/")


def not_finite(tree: Any) -> str | None:
    """Returns the path of the first array that holds NaN or an infinity, or None."""
    floats = {x: y for x, y in _arrays(tree).items() if jnp.issubdtype(y.dtype, jnp.inexact)}
    are_finite = jax.device_get(_are_finite(list(floats.values())))
    return next((name for name, x in zip(floats, are_finite, strict=True) if not x), None)


@jax.jit
def _are_finite(leaves: list) -> list:
    """Returns, for each array, whether all its values are finite.

    It runs on the devices of the arrays, since a process may hold only parts of them.
    """
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def as_shapes(tree: Any) -> Any:
    """Returns the tree with a jax.ShapeDtypeStruct, with a sharding, for each array.

    An array without a sharding in `tree` is placed on one device, whatever sharding it was saved
    with.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        where = getattr(x, "sharding", None) or one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


def check_equal(where: Path, stored: Any, wanted: Any) -> None:
    """Raises ValueError naming the first leaf that differs in presence, shape or dtype."""
    stored, wanted = leaf_types(stored), leaf_types(wanted)
    for name in sorted(stored.keys() | wanted.keys()):
        a, b = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise ValueError(f"{where} does not fit this model: {name} is {a}, expected {b}")


def _arrays(tree: Any) -> dict[str, Any]:
    """Returns the leaves that have a shape, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_types(tree: Any) -> dict[str, str]:
    """Returns the dtype and the shape of each array of a tree, as text, by its path."""
    arrays = {x: y for x, y in _arrays(tree).items() if not isinstance(y, np.generic)}
    return {name: f"{x.dtype} {tuple(x.shape)}" for name, x in arrays.items()}
