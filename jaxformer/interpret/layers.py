"""Helpers that select layers by hook point, by attention heads, or by an index inside `jax.jit`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.layer import Layer, layer_hook_points, list_sublayers
from jaxformer.functional.model import PREFIX
from jaxformer.functional.stack import Stack
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel
from jaxformer.terminal import kind_of

# The index of a layer.
Index = int | Int[Array, ""]
ATTENTIONS = ("attention", "cross_attention", "encoder.attention")


def weights_of_layer(weights: Weights, layer: Index) -> Weights:
    """Returns the weights of the layer with the index `layer`."""
    return jax.tree.map(lambda leaf: leaf[layer], weights["blocks"])


def by_layer(
    stack: Stack, weights: Weights, run: Callable[..., Array], index: Index, *arguments: Any
) -> Array:
    """Calls `run(layer, layer_weights, *arguments)` for one layer.

    Args:
        stack: the layers of the model.
        weights: the weights of the model.
        run: the function to call. Layers with equal settings share one trace of this function.
        index: the index of the layer, a Python integer or a traced JAX integer.
        *arguments: the remaining arguments of `run`.
    """
    layers = list(dict.fromkeys(stack.layers))
    number = jnp.asarray([layers.index(layer) for layer in stack.layers])[index]
    runs = [partial(run, layer) for layer in layers]
    return jax.lax.switch(number, runs, weights_of_layer(weights, index), *arguments)


def self_attention_layer(layer: Layer) -> Attention:
    """Returns the self-attention sub-layer of a layer, which must have one."""
    return next(x for x in list_sublayers(layer) if isinstance(x, Attention))


def project(
    layer: Layer, tokens: Tokens, weights: Weights, x: Float[Array, "batch length dim"]
) -> tuple[Array, Array, Array]:
    """Computes the queries, keys and values of a layer's self-attention.

    Args:
        layer: the layer.
        tokens: the input tokens with a context for each sub-layer, from `with_contexts`. For
            attention, the context holds the mask, the keys and the settings of the scores.
        weights: the weights of the layer.
        x: the input of the layer.
    """
    attention = self_attention_layer(layer)
    normed = layer[0].sublayer_input(attention, weights, x)
    return attention.project(weights["attention"], normed, tokens.contexts[attention])


def layers_with(model: LanguageModel, point: str) -> list[int]:
    """Returns the indices of the layers that have a hook point, in increasing order."""
    layers, name = _stack_layers(model, point)
    return [number for number, layer in enumerate(layers) if name in layer_hook_points(layer)]


def _stack_layers(model: LanguageModel, name: str) -> tuple[tuple[Layer, ...], str]:
    """Returns all layers of the stack that `name` refers to, and the name without a prefix.

    A name with the prefix "encoder." refers to the layers of the encoder.
    """
    short = name.removeprefix(PREFIX)
    own = model.architecture if short == name else model.architecture.encoder
    return () if own is None else own.stack.layers, short


def mixed_layers(model: LanguageModel) -> str | None:
    """Returns the reason why a traced index cannot select a layer's weights; None if it can."""
    if len(groups := model.architecture.stack.groups) == 1:
        return None
    return (
        f"layers {groups[0][0]} and {groups[1][0]} of the model have weights of different shapes; "
        "all layers must have equal shapes"
    )


def transformer_config(model: LanguageModel) -> TransformerConfig:
    """Returns the model's config as a `TransformerConfig`.

    Raises:
        ValueError: The model is not a Transformer.
    """
    if not isinstance(model.config, TransformerConfig):
        raise ValueError(f"model is {kind_of(model)}; it must be a Transformer")
    return model.config


def heads_shape(model: LanguageModel, attention: str) -> tuple[int, int]:
    """Returns the number of layers and the number of heads per layer.

    Args:
        model: any model.
        attention: one of `ATTENTIONS`.

    Raises:
        ValueError: The number of heads differs between layers or is 0.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}; it must be one of {', '.join(ATTENTIONS)}")
    counts = {}
    if isinstance(model, LanguageModel):
        counts = {name: _head_counts(model, name) for name in ATTENTIONS}
    present = [name for name, numbers in counts.items() if any(numbers)]
    if attention not in present:
        accepted = "it must be a Transformer with attention in every layer"
        if present:
            accepted = f"its attention is {' or '.join(present)}"
        raise ValueError(f"model is {kind_of(model)} without {attention!r} heads; {accepted}")
    numbers = counts[attention]
    for layer, number in enumerate(numbers):
        if number != max(numbers):
            raise ValueError(
                f"layer {layer} of the model has {number or 'no'} heads of {attention!r}, and "
                f"layer {numbers.index(max(numbers))} has {max(numbers)}; all layers must have "
                "the same number of heads"
            )
    return len(numbers), numbers[0]


def _head_counts(model: LanguageModel, attention: str) -> list[int]:
    """Returns the number of heads in each layer's sub-layer `attention`; 0 if it has none."""
    layers, name = _stack_layers(model, attention)
    return [
        sum(x.units()[0] for x in list_sublayers(layer) if x.name == name and x.units())
        for layer in layers
    ]
