"""Activation patching over every layer, head and position of a point.

A sweep runs a model on a corrupted text once for each site, with the value at that site replaced by
its value on a clean text. The change of a metric says how much the site carries of the difference
between the two texts.

Reference:
    Vig et al. 2020; Meng et al. 2022, "Locating and Editing Factual Associations in GPT";
    Heimersheim and Nanda 2024, "How to use and interpret activation patching".
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.interpret.metrics import Metric, checked_metric
from jaxformer.interpret.resumed import can_resume, resumed_effects
from jaxformer.interpret.sites import (
    Grid,
    Site,
    checked_grid,
    checked_pair,
    metric_of,
    pad_sites,
)
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables

OnProgress = Callable[[int, int], Any]
_CHUNKS_PER_CALL = 8  # between two reports of progress


class Sweep(NamedTuple):
    """Result of `patch_sweep`.

    Attributes:
        effects: float32, with one axis for each of `axes`: the metric of the patched corrupted run
            minus that of the corrupted run.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
        axes: the names of the axes of `effects`.
    """

    effects: Float[np.ndarray, "..."]
    clean: float
    corrupted: float
    axes: tuple[str, ...]

    @property
    def recovered(self) -> Float[np.ndarray, "..."]:
        """The effects as shares of clean − corrupted: 1 where a site restores the clean value."""
        return self.effects / (self.clean - self.corrupted)


def patch_sweep(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: Metric,
    point: str = "attention.heads",
    *,
    axes: Iterable[str] | None = None,
    chunk: int = 32,
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Measures the effect of every site of a point on a metric of the corrupted text.

    The runs of a causal Transformer without padding start at the site: the earlier layers and
    positions are those of the corrupted run, which is computed once. This applies to sweeps over
    layers and positions of "block.input" and of the points from "attention.heads" to
    "block.output". Other sweeps run the whole model for each site. The results agree up to
    rounding.

    Args:
        model: any model.
        variables: its variables.
        clean: int [batch, length], or `functional.inputs.Inputs` with a source, segments or types.
        corrupted: the same, of the same shape.
        metric: a number computed from the logits at one position, such as `LogitDifference`.
        point: name of a point, from `model.points`.
        axes: the axes along which sites differ, from "layer", "head" and "position". A site
            includes all of an axis that is not named. None: all axes that the point has.
        chunk: the most runs that are computed together. Memory is proportional to it.
        on_progress: called with (number of measured sites, number of all sites).

    Raises:
        ValueError: an argument is not accepted.
    """
    model.check(variables)
    chunk = whole_number("chunk", chunk, 1)
    axes = axes if axes is None or isinstance(axes, str) else tuple(axes)
    read, changed = checked_pair(clean, corrupted, model.config)
    metric = checked_metric(metric, changed, model.config.vocab_size)
    weights = variables["params"]
    grid = checked_grid(model, point, axes, weights, changed)
    clean_metric, value = capture(model, weights, read, metric, point)
    corrupted_metric, _ = capture(model, weights, changed, metric, None)
    report = on_progress or (lambda done, total: None)
    measure = resumed_effects if can_resume(model, changed, grid) else whole_effects
    metrics = measure(model, weights, changed, metric, grid, value, chunk, report)
    effects = metrics - np.float32(corrupted_metric)
    return Sweep(effects, float(clean_metric), float(corrupted_metric), grid.axes)


@partial(jax.jit, static_argnames=("model", "point"))
def capture(
    model: LanguageModel, weights: Weights, inputs: Inputs, metric: Metric, point: str | None
) -> tuple[Float[Array, ""], Shaped[Array, "..."] | None]:
    """Returns (the metric, the value at the point), or None as value if there is no point."""
    hooks = Hooks(() if point is None else (point,))
    measured, captured = metric_of(model, weights, inputs, metric, hooks)
    return measured, None if point is None else captured[point]


def whole_effects(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    grid: Grid,
    value: Shaped[Array, "..."],
    chunk: int,
    report: OnProgress,
) -> Float[np.ndarray, "..."]:
    """Returns the metric for every site, by passes of the whole model."""
    sites = grid.sites()
    total, found = len(sites.layer), []
    chunk = min(chunk, total)
    size = min(chunk * _CHUNKS_PER_CALL, total + -total % chunk)
    padded = pad_sites(sites, size)
    for first in range(0, total, size):
        some = Site(*(x[first : first + size] for x in padded))
        part = patched_metrics(model, weights, inputs, metric, grid, value, some, chunk)
        found.append(np.asarray(part))
        report(min(first + size, total), total)
    return np.concatenate(found)[:total].reshape(grid.sizes)


@partial(jax.jit, static_argnames=("model", "grid", "chunk"))
def patched_metrics(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    grid: Grid,
    value: Shaped[Array, "..."],
    sites: Site,
    chunk: int,
) -> Float[Array, " sites"]:
    """Computes the metric of the inputs with each site replaced by its part of `value`."""

    def patched(site: Site) -> Float[Array, ""]:
        hooks = Hooks(patch={grid.point: Patch(grid.where(site), value)})
        return metric_of(model, weights, inputs, metric, hooks)[0]

    return jax.lax.map(patched, jax.tree.map(jnp.asarray, sites), batch_size=chunk)
