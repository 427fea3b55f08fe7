"""Layers of a model: which have a point or heads, and layers whose index is traced."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.layer import Layer, layer_points, sublayers_of
from jaxformer.functional.model import PREFIX
from jaxformer.functional.stack import Stack
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel

ATTENTIONS = ("attention", "cross_attention", "encoder.attention")


def weights_of_layer(weights: Weights, layer: Any) -> Weights:
    """Returns the weights of one block."""
    return jax.tree.map(lambda leaf: leaf[layer], weights["blocks"])


def by_layer(
    stack: Stack, weights: Weights, run: Callable[..., Array], index: Any, *arguments: Any
) -> Array:
    """Calls run(layer, its weights, *arguments) with a layer whose index may be traced.

    Args:
        stack: the layers.
        weights: the weights of the model.
        run: the function to call. It is traced once for each different layer.
        index: index of the layer.
        *arguments: the remaining arguments of `run`.
    """
    layers = list(dict.fromkeys(stack.layers))
    number = jnp.asarray([layers.index(layer) for layer in stack.layers])[index]
    runs = [partial(run, layer) for layer in layers]
    return jax.lax.switch(number, runs, weights_of_layer(weights, index), *arguments)


def attention_of(layer: Layer) -> Attention:
    """Returns the self-attention of a layer that has one."""
    return next(x for x in sublayers_of(layer) if isinstance(x, Attention))


def project(
    layer: Layer, tokens: Tokens, weights: Weights, x: Float[Array, "batch length dim"]
) -> tuple[Array, Array, Array]:
    """Computes (queries, keys, values) of a layer's self-attention from the layer's input.

    Args:
        layer: the layer.
        tokens: the pass, with the contexts of the sub-layers.
        weights: the weights of the layer.
        x: the input of the layer.
    """
    attention = attention_of(layer)
    normed = layer[0].input_of(attention, weights, x)
    return attention.project(weights["attention"], normed, tokens.contexts[attention])


def layers_with(model: LanguageModel, point: str) -> list[int]:
    """Returns the numbers of the layers that have a point; captured values have these layers."""
    own, name = model.architecture, point.removeprefix(PREFIX)
    if name != point and own.encoder is not None:
        own = own.encoder
    return [n for n, layer in enumerate(own.stack.layers) if name in layer_points(layer)]


def mixed_layers(model: LanguageModel) -> str | None:
    """Returns why the index of a layer of the model must be static; None if it may be traced."""
    if len(groups := model.architecture.stack.groups) == 1:
        return None
    return (
        f"layers {groups[0][0]} and {groups[1][0]} of the model have weights of different shapes; "
        "this needs equal layers"
    )


def transformer_config(model: LanguageModel) -> TransformerConfig:
    """Returns the config of a Transformer.

    Raises:
        ValueError: the model has no self-attention.
    """
    if not isinstance(model.config, TransformerConfig):
        raise ValueError(f"model is a {type(model).__name__}; it must be a Transformer")
    return model.config


def heads_shape(model: LanguageModel, attention: str) -> tuple[int, int]:
    """Returns (number of layers, number of heads) of a model with heads in every layer.

    Args:
        model: any model.
        attention: one of `ATTENTIONS`.

    Raises:
        ValueError: a layer of the model has no heads of this attention.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}; it must be one of {', '.join(ATTENTIONS)}")
    has_heads = isinstance(model, LanguageModel) and model.config.heads
    points = model.layer_points if has_heads else ()
    present = [name for name in ATTENTIONS if f"{name}.weights" in points]
    if attention not in present:
        accepted = "accepted are Transformers: Decoder, Encoder and EncoderDecoder"
        if present:
            accepted = f"its attention is {' or '.join(present)}"
        raise ValueError(
            f"model is a {type(model).__name__}, which has no heads of {attention!r}; {accepted}"
        )
    config = model.config.stacks["encoder/" if attention.startswith("encoder.") else ""]
    having = layers_with(model, f"{attention}.weights")
    if lacking := sorted(set(range(config.num_layers)) - set(having)):
        raise ValueError(
            f"layer {lacking[0]} of the model has no {attention}; heads are measured in models in "
            "which every layer has it"
        )
    return config.num_layers, config.heads[0]
