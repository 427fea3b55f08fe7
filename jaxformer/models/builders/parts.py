"""Builders of norms and heads for several architectures, and checks of user-defined layers."""

from collections import Counter
from dataclasses import replace
from functools import cache

from jaxformer.functional.embedding import FeatureVectors, InputVectors, TokenVectors
from jaxformer.functional.layers.layer import Layer, Parallel, Residual, list_sublayers
from jaxformer.functional.layers.norms import NORMS, Norm
from jaxformer.functional.layers.sublayer import SubLayer
from jaxformer.functional.model import Model
from jaxformer.functional.outputs import Head
from jaxformer.functional.stack import Stack
from jaxformer.models.config import ConvolutionalConfig, RecurrentConfig
from jaxformer.models.config.encoder import ReadsSource
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.terminal import kind_of


def build_norm(config: TransformerConfig | ConvolutionalConfig) -> Norm | None:
    """Builds the norm of a config; None if the config does not have a norm."""
    return NORMS[config.norm](config.norm_epsilon, bool(config.norm_bias))


def build_head(config: TransformerConfig | ConvolutionalConfig | RecurrentConfig, dim: int) -> Head:
    """Builds the output head of a config, for hidden states with `dim` features."""
    tied, cap = config.tie_embeddings, config.logits_softcap
    return Head(config.vocab_size, dim, tied, config.head_bias, cap)


def build_source_vectors(config: ReadsSource) -> InputVectors:
    """Builds the embedding layer of a model's source."""
    if config.source_features is not None:
        return FeatureVectors(config.source_features)
    return TokenVectors(config.num_source_ids)


@cache
def with_layers(architecture: Model, layers: tuple[Layer, ...]) -> Model:
    """Replaces the layers of an architecture.

    Raises:
        ValueError: The number of layers is wrong, or a layer or its width is invalid.
    """
    stack = architecture.stack
    if len(layers) != len(stack.layers):
        raise ValueError(
            f"layers has {len(layers)} entries, but the config has num_layers {len(stack.layers)}"
        )
    for number, layer in enumerate(layers):
        check_layer(layer, f"layers[{number}]")
    stack = replace(stack, layers=layers)
    check_widths(stack, architecture.head)
    return replace(architecture, stack=stack)


def check_widths(stack: Stack, head: Head | None) -> None:
    """Raises ValueError if a width does not fit a residual connection or the output head."""
    for number, (layer, dim) in enumerate(zip(stack.layers, stack.dims, strict=False)):
        for part in layer:
            output_dim = part.output_dim(dim)
            for sublayer in part.sublayers:
                returned = sublayer.output_dim(dim)
                if returned != output_dim:
                    raise ValueError(
                        f"layers[{number}]: the sub-layer {sublayer.name!r} returns {returned} "
                        f"features; with a residual connection, it must return {dim} features"
                    )
            dim = output_dim
    if head is not None and stack.dims[-1] != head.dim:
        raise ValueError(
            f"layers: the last layer returns {stack.dims[-1]} features; the head reads {head.dim}"
        )


def check_layer(layer: Layer, where: str) -> None:
    """Raises ValueError unless `layer` is a tuple of `Residual`, `Plain` and `Parallel`."""
    if not isinstance(layer, tuple) or not layer:
        raise ValueError(
            f"{where} is {kind_of(layer)}; it must be a tuple of at least one Residual, "
            "Plain or Parallel"
        )
    for part in layer:
        if not isinstance(part, Residual | Parallel):
            raise ValueError(
                f"{where} has {kind_of(part)}; its entries must be Residual, Plain or Parallel"
            )
    for sublayer in list_sublayers(layer):
        if not isinstance(sublayer, SubLayer):
            raise ValueError(
                f"{where} has the sub-layer {type(sublayer).__name__}; it must be a SubLayer"
            )
    name, count = Counter(sublayer.name for sublayer in list_sublayers(layer)).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{where} has {count} sub-layers named {name!r}; their weights need different names"
        )
