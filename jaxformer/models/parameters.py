"""Parameters of a model: initial values, shapes, number, and stacked trees of layers."""

from typing import Any

import jax

from jaxformer.functional.model import weight_shapes
from jaxformer.models.builders.transformers import build_stack
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel


def init(model: LanguageModel, key: jax.Array) -> dict[str, Any]:
    """Returns the model's initial variables. Unlike `model.init`, this needs no inputs."""
    return dict(model.init(key, method=LanguageModel.head))


def shape_tree(model: LanguageModel) -> dict:
    """Returns the shapes of the model's parameters without creating arrays."""
    return dict(weight_shapes(model.architecture))


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of parameters of the model, without creating arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(shape_tree(build(config))))


# Paths of stacked trees, in which the first axis of each array is the layer. If the layers have
# different shapes, all layers with equal weight shapes share a tree. The path of this tree ends
# with the index of the first of these layers, as in "blocks/2".
STACKS = ("blocks", "encoder/blocks")


def stacked_tree(path: tuple) -> str | None:
    """Returns the path of the stacked tree that contains a parameter, such as "blocks/2".

    Args:
        path: the path of the parameter, as in `jax.tree_util.tree_map_with_path`.

    Returns:
        The path, or None if the parameter does not belong to a stacked tree.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stack = next((stack for stack in STACKS if name.startswith(f"{stack}/")), None)
    if stack is None:
        return None
    group = name.removeprefix(f"{stack}/").partition("/")[0]
    return f"{stack}/{group}" if group.isdecimal() else stack


def layers_by_tree(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the indices of the layers in each stacked tree, by the path of the tree."""
    found = {}
    for prefix, own in config.stacks.items():
        # pyrefly: ignore[bad-argument-type] (the stacks of a Transformer have such configs)
        groups = build_stack(own).groups
        for layers in groups:
            group = f"/{layers[0]}" if len(groups) > 1 else ""
            found[f"{prefix}blocks{group}"] = layers
    return found
