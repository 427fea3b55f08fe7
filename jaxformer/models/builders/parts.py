"""Parts that models of several kinds have: norms, heads, and layers that the caller defines."""

from collections import Counter
from dataclasses import replace
from functools import cache

from jaxformer.functional.layers.layer import Layer, Parallel, Residual, sublayers_of
from jaxformer.functional.layers.norms import NORMS, Norm
from jaxformer.functional.layers.sublayer import SubLayer
from jaxformer.functional.model import Model
from jaxformer.functional.outputs import Head
from jaxformer.functional.stack import Stack
from jaxformer.models.config import ConvolutionalConfig, RecurrentConfig
from jaxformer.models.config.transformer import TransformerConfig


def norm_of(config: TransformerConfig | ConvolutionalConfig) -> Norm | None:
    """Returns the norm that a config describes; None if it has none."""
    return NORMS[config.norm](config.norm_epsilon, bool(config.norm_bias))


def head_of(config: TransformerConfig | ConvolutionalConfig | RecurrentConfig, dim: int) -> Head:
    """Returns the head that a config describes; it reads `dim` features."""
    tied, cap = config.tie_embeddings, config.logits_cap
    return Head(config.vocab_size, dim, tied, config.head_bias, cap)


@cache
def with_layers(architecture: Model, layers: tuple[Layer, ...]) -> Model:
    """Returns the architecture with these layers in place of its own.

    Raises:
        ValueError: a layer is not accepted.
    """
    stack = architecture.stack
    if len(layers) != len(stack.layers):
        raise ValueError(
            f"layers has {len(layers)} layers; num_layers of the config is {len(stack.layers)}"
        )
    for number, layer in enumerate(layers):
        check_layer(layer, f"layers[{number}]")
    stack = replace(stack, layers=layers)
    check_widths(stack, architecture.head)
    return replace(architecture, stack=stack)


def check_widths(stack: Stack, head: Head | None) -> None:
    """Raises ValueError unless each part of a layer accepts the features of the part before."""
    for number, (layer, dim) in enumerate(zip(stack.layers, stack.dims, strict=False)):
        for part in layer:
            for sublayer in part.sublayers:
                returned = sublayer.output_dim(dim)
                if returned != dim and (isinstance(part, Parallel) or part.adds):
                    raise ValueError(
                        f"layers[{number}]: the sub-layer {sublayer.name!r} returns {returned} "
                        f"features, which cannot be added to its input of {dim}"
                    )
            dim = part.output_dim(dim)
    if head is not None and stack.dims[-1] != head.dim:
        raise ValueError(
            f"layers: the last layer returns {stack.dims[-1]} features; the head reads {head.dim}"
        )


def check_layer(layer: Layer, where: str) -> None:
    """Raises ValueError unless this is a layer."""
    if not isinstance(layer, tuple) or not layer:
        raise ValueError(f"{where} is a {type(layer).__name__}; it must be a tuple of parts")
    for part in layer:
        if not isinstance(part, Residual | Parallel):
            raise ValueError(
                f"{where} has a {type(part).__name__}; its parts must be Residual or Parallel"
            )
    for sublayer in sublayers_of(layer):
        if not isinstance(sublayer, SubLayer):
            raise ValueError(
                f"{where} has the sub-layer {type(sublayer).__name__}; it must be a SubLayer"
            )
    name, count = Counter(sublayer.name for sublayer in sublayers_of(layer)).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{where} has {count} sub-layers named {name!r}; their weights need different names"
        )
