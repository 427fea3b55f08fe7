"""Optimizers whose rule computes a statistic of each array, on parameters of stacked layers."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxformer.models.stacks import stacked_tree

_OTHER = "other"  # the label of the parameters that no layer has


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Applies an optimizer to each layer of the model as if its arrays were separate.

    A model stacks the kernels of its layers into one array [layers, in, out]. Rules such as those
    of Adafactor, LAMB and LARS compute a norm or another statistic of each array, which must be of
    one layer. Element-wise rules such as Adam's need no mapping. Rules that depend on all
    parameters, such as clipping by the global norm, must stay outside:

        optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lamb(1e-3)))

    Args:
        optimizer: An optax optimizer.

    Returns:
        The optimizer. Its state has the layers along the first axis of each array, as the
        parameters have, so it is sharded like them.
    """
    inner = optax.with_extra_args_support(optimizer)
    mapped = optax.GradientTransformationExtraArgs(
        lambda params: _over_layers(inner.init, params),
        lambda updates, state, params=None, **extra: _over_layers(
            lambda *arrays: inner.update(*arrays, **extra), updates, state, params
        ),
    )

    def by_tree(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        trees = dict.fromkeys(jax.tree.leaves(_labels(params)), mapped)
        return optax.partition({**trees, _OTHER: inner}, _labels)

    return optax.GradientTransformationExtraArgs(
        lambda params: by_tree(params).init(params),
        lambda updates, state, params=None, **extra: by_tree(updates).update(
            updates, state, params, **extra
        ),
    )


def _over_layers(function: Callable, tree: Any, *more: Any) -> Any:
    """Maps a function over the first axis of all arrays; a model may lack this stack."""
    if not jax.tree.leaves(tree):
        return function(tree, *more)
    return jax.vmap(function)(tree, *more)


def _labels(params: optax.Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: stacked_tree(path) or _OTHER, params)
