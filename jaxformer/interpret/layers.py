"""Blocks of a Transformer whose index is known only at run time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.family import Weights


def weights_of_layer(weights: Weights, layer: Any) -> Weights:
    """Returns the weights of one block."""
    return jax.tree.map(lambda leaf: leaf[layer], weights["blocks"])


def by_setting(config: Any, run: Callable[..., Array], layer: Any, *arguments: Any) -> Array:
    """Calls run(setting, *arguments) with the setting of a layer whose index may be traced.

    Args:
        config: the config of a Transformer.
        run: the function to call. It is traced once for each different setting of `config.layers`.
        layer: index of the layer.
        *arguments: the remaining arguments of `run`.
    """
    settings = list(dict.fromkeys(config.layers))
    index = jnp.asarray([settings.index(setting) for setting in config.layers])[layer]
    return jax.lax.switch(index, [partial(run, setting) for setting in settings], *arguments)
