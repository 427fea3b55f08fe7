"""Blocks of a Transformer whose index is known only at run time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.layer import Layer, layer_points, sublayers_of
from jaxformer.functional.model import PREFIX
from jaxformer.functional.stack import Stack
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel


def weights_of_layer(weights: Weights, layer: Any) -> Weights:
    """Returns the weights of one block."""
    return jax.tree.map(lambda leaf: leaf[layer], weights["blocks"])


def by_layer(stack: Stack, run: Callable[..., Array], index: Any, *arguments: Any) -> Array:
    """Calls run(layer, *arguments) with a layer whose index may be traced.

    Args:
        stack: the layers.
        run: the function to call. It is traced once for each different layer.
        index: index of the layer.
        *arguments: the remaining arguments of `run`.
    """
    layers = list(dict.fromkeys(stack.layers))
    number = jnp.asarray([layers.index(layer) for layer in stack.layers])[index]
    return jax.lax.switch(number, [partial(run, layer) for layer in layers], *arguments)


def attention_of(layer: Layer) -> Attention:
    """Returns the self-attention of a layer.

    Raises:
        ValueError: the layer has none.
    """
    for sublayer in sublayers_of(layer):
        if isinstance(sublayer, Attention):
            return sublayer
    raise ValueError("the layer has no self-attention")


def layers_with(model: LanguageModel, point: str) -> list[int]:
    """Returns the numbers of the layers that have a point; captured values have these layers."""
    own, name = model.architecture, point.removeprefix(PREFIX)
    if name != point and own.encoder is not None:
        own = own.encoder
    return [n for n, layer in enumerate(own.stack.layers) if name in layer_points(layer)]


def mixed_layers(model: LanguageModel) -> str | None:
    """Returns why the index of a layer of the model must be static; None if it may be traced."""
    if len(groups := stack_of_model(model).groups) == 1:
        return None
    first, second = groups[0][0], groups[1][0]
    return (
        f"layers {first} and {second} of the model have weights of different shapes; this needs "
        "equal layers"
    )


def transformer_config(model: LanguageModel) -> TransformerConfig:
    """Returns the config of a Transformer.

    Raises:
        ValueError: the model has no self-attention.
    """
    if not isinstance(model.config, TransformerConfig):
        raise ValueError(f"model is a {type(model).__name__}; it must be a Transformer")
    return model.config


def stack_of_model(model: LanguageModel) -> Stack:
    """Returns the layers of a model.

    Raises:
        ValueError: the model has no self-attention.
    """
    if not model.attends:
        raise ValueError(f"model is a {type(model).__name__}; it must be a Transformer")
    return model.architecture.stack
