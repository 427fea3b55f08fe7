"""Weights in the layout for decoding."""

import os
from functools import partial

import jax

from jaxformer.functional.machine import platform
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables


@in_auto_axes
def prepare(model: LanguageModel, variables: Variables) -> Variables:
    """Returns {"prepared": …}, which `start`, `advance` and `generate` accept as variables.

    These are the weights in the layout for decoding, a second copy in memory. `generate` and
    `beam_search` prepare params at every call: prepare them once yourself, or use
    `checkpoint.prepared()`, to generate repeatedly.

    Args:
        model: an autoregressive model.
        variables: its variables, {"params": …}; a result of `prepare` is returned unchanged.

    Raises:
        ValueError: the model is not autoregressive, or the variables have no params.
    """
    require_autoregressive(model)
    name, weights = stored_weights(variables, "prepared", "params")
    if name == "prepared":
        return variables
    return {"prepared": prepare_weights(model, weights, parallel_parts())}


@partial(jax.jit, static_argnums=(0, 2))
def prepare_weights(model: LanguageModel, params: Weights, parts: int) -> Weights:
    """Repacks the params in one compiled program; see `prepare`."""
    return model.prepare(params, parts)


def parallel_parts() -> int:
    """Returns the number of parts of a product that XLA computes in parallel.

    It is the number of cores of a CPU, at most 8, and 1 for an accelerator.
    """
    return min(os.cpu_count() or 1, 8) if platform() == "cpu" else 1


def weights_of(variables: Variables) -> Weights:
    """Returns the weights of variables, for the methods of a model."""
    return stored_weights(variables, "prepared", "params")[1]


def stored_weights(variables: Variables, *accepted: str) -> tuple[str, Weights]:
    """Returns (name, weights) for the first of the accepted names that the variables have."""
    for name in accepted:
        if name in variables:
            return name, variables[name]
    raise ValueError(
        f"variables hold {', '.join(variables) or 'nothing'}; they must hold "
        f"{' or '.join(map(repr, accepted))} (model.init gives 'params', prepare 'prepared')"
    )
