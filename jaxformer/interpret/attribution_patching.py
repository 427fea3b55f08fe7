"""Attribution patching: the effects of all patch sites from one backward pass.

Activation patching (`sweep.patch_sweep`) runs the model once for each patch site. Attribution
patching replaces these runs by a linear approximation around the corrupted run:

    effect ≈ Σ ∂metric/∂a · (a_clean − a_corrupted)

a is the activation at the patch site, and the sum runs over its entries. The approximation is exact
if the metric is a linear function of the activation.

Reference:
    Nanda 2023, "Attribution patching"; Kramár et al. 2024 (AtP*).
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.hooks import Edit, EditAt, Hooks
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import layer_hook_points
from jaxformer.functional.model import PREFIX
from jaxformer.functional.trees import Weights
from jaxformer.interpret.patching import (
    AnyMetric,
    Metric,
    checked_grid,
    checked_metric,
    checked_pair,
    measure,
    run_metric,
)
from jaxformer.interpret.sweep import Sweep
from jaxformer.models.check import AnyArray
from jaxformer.models.language_model import LanguageModel, Variables


def attribution_sweep(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
    point: str = "attention.heads",
    *,
    axes: Iterable[str] | None = None,
) -> Sweep:
    """Approximates the result of `patch_sweep` by one forward and one backward pass.

    Args:
        model: any model.
        variables: the model's variables.
        clean: the clean text; see `patch_sweep`.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        metric: a function of the logits; see `patch_sweep`.
        point: name of a hook point, from `model.hook_points`.
        axes: the axes along which patch sites differ, from "layer", "head" and "position". A patch
            site covers all entries of the remaining axes. Defaults to all axes of the hook point.

    Returns:
        The approximate effects, and the metrics of the two texts, which are exact.

    Raises:
        ValueError: An argument is invalid.
    """
    model.check(variables)
    read, changed = checked_pair(clean, corrupted, model.config)
    measured = checked_metric(metric, changed, model.config.vocab_size)
    weights = variables["params"]
    grid = checked_grid(model, point, axes, weights, changed)
    if "recurrent." in point and changed.segment_ids is not None:
        raise ValueError("segment_ids are not accepted at a hook point of a recurrent layer")
    clean_metric, captured = measure(model, weights, read, measured, Hooks((point,)))
    base, values = measure(model, weights, changed, measured, Hooks((point,)))
    layers = _layers_with(model, point) if grid.has_layers else np.zeros(0, np.int32)
    slopes = metric_gradient(model, weights, changed, measured, point, values[point], layers)
    # At masked keys, both scores are −∞.
    differences = jnp.where(captured[point] == values[point], 0.0, captured[point] - values[point])
    products = np.asarray(slopes * differences)
    kept = {"layer": 0, "head": products.ndim - 3, "position": products.ndim - 2}
    others = set(range(products.ndim)) - {kept[name] for name in grid.axes}
    effects = products.sum(axis=tuple(sorted(others)), dtype=np.float32)
    return Sweep(effects, float(clean_metric), float(base), grid.axes)


@partial(jax.jit, static_argnames=("model", "point"))
def metric_gradient(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    point: str,
    like: Float[Array, "..."],
    layers: Int[Array | np.ndarray, " layers"],
) -> Float[Array, "..."]:
    """Computes the gradient of a metric with respect to the value at a hook point.

    Args:
        model: the model.
        weights: the model's parameters.
        inputs: the text.
        metric: the metric.
        point: name of the hook point.
        like: an array with the shape of the captured value; inside the layers, the first axis is
            the layer.
        layers: the numbers of the layers that have the hook point.
    """

    def measured(shift: Float[Array, "..."]) -> Float[Array, ""]:
        hooks = Hooks(patch={point: Edit(_shifted, shift, jnp.asarray(layers))})
        return run_metric(model, weights, inputs, metric, hooks)[0]

    return jax.grad(measured)(jnp.zeros_like(like))


def _shifted(
    value: Float[Array, "*shape"],
    at: EditAt,
    shift: Float[Array, "..."],
    layers: Int[Array, " layers"],
) -> Float[Array, "*shape"]:
    """Adds the layer's shift. A recurrent layer reads one token and adds this token's shift."""
    own = shift if at.layer is None else shift[jnp.equal(layers, at.layer).argmax()]
    if value.shape[-2] < own.shape[-2]:
        position = jnp.asarray(at.positions).reshape(-1)[0]
        own = jax.lax.dynamic_slice_in_dim(own, position, 1, axis=-2)
    return value + own.astype(value.dtype)


def _layers_with(model: LanguageModel, point: str) -> Int[np.ndarray, " layers"]:
    """Returns the numbers of the layers that have a hook point."""
    architecture, name = model.architecture, point
    if point.startswith(PREFIX) and architecture.encoder is not None:
        architecture, name = architecture.encoder, point.removeprefix(PREFIX)
    layers = architecture.stack.layers
    found = [n for n, layer in enumerate(layers) if name in layer_hook_points(layer)]
    return np.array(found, np.int32)
