"""Parameters of a model: initial values, shapes and number."""

from typing import Any

import jax

from jaxformer.functional.model import weight_shapes
from jaxformer.models.config.model import ModelConfig
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
