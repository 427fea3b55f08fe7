"""Partition of a model's parameters into trainable and frozen leaves.

Both parts have the structure of the parameters, with None in place of the leaves of the other part.
JAX treats None as an empty tree, so optimizers and gradients skip these leaves.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxformer.functional.linear.low_rank import is_low_rank


def partition(params: Any) -> tuple:
    """Splits parameters into (trainable, frozen).

    If some kernels are `LowRankKernel`s, only their A and B are trainable. If no kernel is a
    `LowRankKernel`, all parameters are trainable.

    Args:
        params: the parameters, or a tree of their shapes or shardings.
    """
    has_updates = any(map(is_low_rank, jax.tree.leaves(params, is_leaf=is_low_rank)))

    def is_trainable(x: Any) -> Any:
        if is_low_rank(x):
            return replace(jax.tree.map(lambda _: False, x), down=True, up=True)
        return not has_updates

    chosen = jax.tree.map(is_trainable, params, is_leaf=is_low_rank)
    trainable = jax.tree.map(lambda x, is_chosen: x if is_chosen else None, params, chosen)
    frozen = jax.tree.map(lambda x, is_chosen: None if is_chosen else x, params, chosen)
    return trainable, frozen


def num_trainable(params: Any) -> int:
    """Returns the number of trainable parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(partition(params)[0]))


def combine(trainable: Any, frozen: Any) -> Any:
    """Combines the trainable and the frozen part; the inverse of `partition`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, trainable, frozen, is_leaf=lambda x: x is None
    )


def trainable_value_and_grad(function: Callable, *, has_aux: bool = False) -> Callable:
    """Returns `jax.value_and_grad(function)` for the trainable leaves only.

    Args:
        function: a function of parameters and further arguments.
        has_aux: see `jax.value_and_grad`.

    Returns:
        A function of the same arguments that returns the value and the gradient. The gradient has
        None in place of frozen leaves.
    """

    def value_and_grad(params: Any, *arguments: Any) -> Any:
        trainable, frozen = partition(params)
        return jax.value_and_grad(
            lambda trainable: function(combine(trainable, frozen), *arguments), has_aux=has_aux
        )(trainable)

    return value_and_grad
