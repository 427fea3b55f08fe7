"""Parameters of a model: initial values, shapes, number, and the trees of stacked layers."""

from typing import Any

import jax

from jaxformer.functional.model import weight_shapes
from jaxformer.models.builders.transformers import stack_of
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel


def init(model: LanguageModel, key: jax.Array) -> dict[str, Any]:
    """Returns the model's initial variables; no inputs are needed, whatever the model reads."""
    return dict(model.init(key, method=LanguageModel.head))


def shape_tree(model: LanguageModel) -> dict:
    """Returns the shapes of the model's parameters without creating arrays."""
    return dict(weight_shapes(model.architecture))


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of parameters of the model, from their shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(shape_tree(build(config))))


# The first axis of each array below these paths is the layer. If the layers have different shapes,
# the number of the first layer of each group of equal layers follows.
STACKS = ("blocks", "encoder/blocks")


def stacked_tree(path: tuple) -> str | None:
    """Returns the path of the tree of stacked layers that holds a parameter, such as "blocks/2".

    Args:
        path: the path of the parameter, as in `jax.tree_util.tree_map_with_path`.

    Returns:
        None if the parameter is of one layer.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    stack = next((stack for stack in STACKS if name.startswith(f"{stack}/")), None)
    if stack is None:
        return None
    group = name.removeprefix(f"{stack}/").partition("/")[0]
    return f"{stack}/{group}" if group.isdecimal() else stack


def layers_by_tree(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the layers in each tree of stacked layers, by its path."""
    found = {}
    for prefix, own in config.stacks.items():
        # pyrefly: ignore[bad-argument-type] (the stacks of a Transformer have such configs)
        groups = stack_of(own).groups
        for layers in groups:
            group = f"/{layers[0]}" if len(groups) > 1 else ""
            found[f"{prefix}blocks{group}"] = layers
    return found
