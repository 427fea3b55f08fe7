"""Attribution patching: the effects of all patch sites from one backward pass.

Activation patching (`sweep.patch_sweep`) runs the model once for each patch site. Attribution
patching replaces these runs by a linear approximation around the corrupted run:

    effect ≈ Σ ∂metric/∂a · (a_clean − a_corrupted)

a is the activation at the patch site, and the sum runs over its entries. The approximation is exact
if the metric is a linear function of the activation.

Reference:
    Nanda 2023, "Attribution patching"; Kramár et al. 2024 (AtP*).
"""

from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.hooks import Edit, EditAt, Hooks, Intervention
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import layers_with
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
    slopes = metric_gradients(model, weights, changed, measured, {point: values[point]})[point]
    # At masked keys, both scores are −∞, and their difference would be NaN.
    differences = jnp.where(captured[point] == values[point], 0.0, captured[point] - values[point])
    products = np.asarray(slopes * differences)
    kept = {"layer": 0, "head": products.ndim - 3, "position": products.ndim - 2}
    others = set(range(products.ndim)) - {kept[name] for name in grid.axes}
    effects = products.sum(axis=tuple(sorted(others)), dtype=np.float32)
    return Sweep(effects, float(clean_metric), float(base), grid.axes)


@partial(jax.jit, static_argnames="model")
def metric_gradients(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    values: Mapping[str, Float[Array, "..."]],
) -> dict[str, Float[Array, "..."]]:
    """Computes the gradient of a metric with respect to the values at several hook points.

    The gradient with respect to a value includes paths through all later hook points, because the
    values at these hook points depend on it.

    Args:
        model: the model.
        weights: the model's parameters.
        inputs: the text.
        metric: the metric.
        values: {name of a hook point: captured value}, of which only the shapes and dtypes are
            used; inside the layers, the first axis is the layer.
    """

    def measured(shifts: dict[str, Float[Array, "..."]]) -> Float[Array, ""]:
        patch: dict[str, Intervention] = {}
        for point, shift in shifts.items():
            layers = jnp.asarray(layers_with(model, point), jnp.int32)
            patch[point] = Edit(_shifted, shift, layers)
        return run_metric(model, weights, inputs, metric, Hooks(patch=patch))[0]

    return jax.grad(measured)({point: jnp.zeros_like(x) for point, x in values.items()})


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
