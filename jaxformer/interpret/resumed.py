"""Sweeps of a causal Transformer whose runs start at the site.

Patching layer l at position p changes no value of layers < l or of positions < p. A run takes them
from the corrupted run.
Within layer l, a point behind the attention changes only the output at p. A run therefore computes

1. one token in layer l,
2. the tokens from a position s ≤ p on in the layers after l, over the corrupted keys and values of
   earlier tokens,
3. in the last layer, keys and values of these tokens, and all else only for the token that the
   metric reads.

s is a multiple of a step, so that there are few shapes to compile. Layers are a loop whose first
layer is known only at run time, so all layers share a program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import Slots
from jaxformer.functional.cache.table import SlotView
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer, LayerInputs, run_layer, sublayers_of
from jaxformer.functional.layers.sublayer import in_pass
from jaxformer.functional.stack import Stack
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    attention_of,
    by_layer,
    mixed_layers,
    stack_of_model,
    weights_of_layer,
)
from jaxformer.interpret.metrics import Metric
from jaxformer.interpret.sites import Grid, Site, is_at, pad_sites
from jaxformer.models.autoregressive import unsupported_reason
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel

_POINTS = ("block.input", "attention.heads", "attention.output", "block.middle")
_POINTS += ("feedforward.hidden", "feedforward.output", "block.output")
_MOST_STARTS = 8  # each start is a program to compile


class CorruptedPass(NamedTuple):
    """Values of the corrupted run, each with the layer as first axis.

    Attributes:
        inputs: the input of each layer.
        keys: the keys of each layer.
        values: the values of each layer.
        heads: the outputs of the heads.
        point: the value at the point of the sweep.
    """

    inputs: Float[Array, "layers batch length dim"]
    keys: Float[Array, "layers batch kv_heads length d"]
    values: Float[Array, "layers batch kv_heads length d"]
    heads: Float[Array, "layers batch heads length d"]
    point: Float[Array, "layers batch *heads length width"]


@dataclass(frozen=True)
class SweepPlan:
    """The part of a sweep that is static in a compiled program.

    Attributes:
        model: the model.
        grid: the sites.
        length: number of tokens up to the one that the metric reads.
        start: the first token that is computed.
        is_last: whether no layer remains after the patched one.
    """

    model: LanguageModel
    grid: Grid
    length: int
    start: int
    is_last: bool

    @property
    def stack(self) -> Stack:
        """The layers of the model."""
        return stack_of_model(self.model)

    def tokens(self, layer: Layer, weights: Weights, first: int) -> Tokens:
        """Returns the pass of a layer over the tokens from `first` on, which see the whole row."""
        new = TokenInfo(self.length - first, jnp.arange(first, self.length, dtype=jnp.int32))
        row = SlotView(TokenInfo(self.length), jnp.int32(first))
        tokens = Tokens(new, self.model.run(), {None: row})
        return in_pass(sublayers_of(layer), tokens, weights)


def can_resume(model: LanguageModel, inputs: Inputs, grid: Grid) -> bool:
    """Returns whether `resumed_effects` supports the sweep."""
    return (
        type(model) is Decoder
        and model.layers is None
        and mixed_layers(model) is None
        and "attention.heads" in model.layer_points
        and unsupported_reason(model) is None
        and model.minimum_prefill == 1
        and inputs.segments is None
        and grid.point in _POINTS
        and {"layer", "position"} <= set(grid.axes)
    )


def resumed_effects(
    model: LanguageModel,
    weights: Weights,
    inputs: Inputs,
    metric: Metric,
    grid: Grid,
    value: Shaped[Array, "..."],
    chunk: int,
    report: Callable[[int, int], Any],
) -> Float[np.ndarray, "..."]:
    """Returns the metric for every site, by passes that start at the site."""
    corrupted_metric, corrupted = corrupted_pass(model, weights, inputs, metric, grid.point)
    metrics = np.full(grid.sizes, corrupted_metric, np.float32)
    by_layer = np.moveaxis(metrics, -1, 1)  # [layers, positions, *heads]
    length, num_layers = metric.position + 1, model.config.num_layers
    step = -(-length // _MOST_STARTS)
    heads = range(grid.shape[-3]) if "head" in grid.axes else (-1,)
    calls = [(layer, start) for start in range(0, length, step) for layer in range(num_layers)]
    for done, (layer, start) in enumerate(calls, 1):
        positions = range(start, min(start + step, length))
        is_last = layer == num_layers - 1 and grid.point != "block.input"
        if is_last:  # other positions of the last layer influence no other token
            positions = positions[-1:] if positions[-1] == length - 1 else ()
        if positions:
            at = np.array([(layer, h, p) for p in positions for h in heads], np.int32)
            sites = pad_sites(Site(*at.T), min(chunk, len(at)))
            plan = SweepPlan(model, grid, length, start, is_last)
            state = (weights, corrupted, value, metric)
            found = resumed_metrics(plan, state, np.int32(layer), sites, min(chunk, len(at)))
            found = np.asarray(found)[: len(at)].reshape(len(positions), *by_layer.shape[2:])
            by_layer[layer, positions.start : positions.stop] = found
        report(done * metrics.size // len(calls), metrics.size)
    return metrics


@partial(jax.jit, static_argnames=("model", "point"))
def corrupted_pass(
    model: LanguageModel, weights: Weights, inputs: Inputs, metric: Metric, point: str
) -> tuple[Float[Array, ""], CorruptedPass]:
    """Returns the metric and the values of the corrupted run."""
    names = ("block.input", "attention.key", "attention.value", "attention.heads", point)
    passed = model.forward(weights, inputs, hooks=Hooks(tuple(dict.fromkeys(names))))
    hidden = jax.lax.dynamic_slice_in_dim(passed.hidden, metric.position, 1, axis=1)
    measured = metric(model.logits(weights, hidden)[:, 0])
    return measured, CorruptedPass(*(passed.captured[name] for name in names))


@partial(jax.jit, static_argnames=("plan", "chunk"))
def resumed_metrics(
    plan: SweepPlan,
    state: tuple[Weights, CorruptedPass, Array, Any],
    layer: Int[Array, ""],
    sites: Site,
    chunk: int,
) -> Float[Array, " sites"]:
    """Computes the metric for sites of one layer, at positions from `plan.start` on."""
    weights, corrupted, value, metric = state

    def patched(site: Site) -> Float[Array, ""]:
        token = patched_token(plan, weights, corrupted, value, layer, site)
        hidden = token if plan.is_last else remaining(plan, weights, corrupted, layer, site, token)
        hidden = plan.model.architecture.finish(weights, hidden)
        return metric(plan.model.logits(weights, hidden)[:, 0])

    return jax.lax.map(patched, jax.tree.map(jnp.asarray, sites), batch_size=chunk)


def patched_token(
    plan: SweepPlan,
    weights: Weights,
    corrupted: CorruptedPass,
    value: Float[Array, "layers batch *heads length width"],
    layer: Int[Array, ""],
    site: Site,
) -> Float[Array, "batch 1 dim"]:
    """Computes the patched layer's output at the site; for "block.input", the patched input.

    The attention of the corrupted run is inserted, so that no other token is computed.
    """
    grid = plan.grid

    def at_site(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.lax.dynamic_slice_in_dim(x[layer], site.position, 1, axis=-2)

    where = is_at(site.head, grid.shape[-3])[:, None, None] if grid.has_heads else True
    new = jnp.where(where, at_site(value), at_site(corrupted.point))
    if grid.point == "block.input":
        return new
    replaced = {"attention.heads": at_site(corrupted.heads), grid.point: new}
    hooks = Hooks(patch={name: Patch(True, x) for name, x in replaced.items()})

    def run(layer: Layer, block: Weights, x: Float[Array, "batch 1 dim"]) -> Array:
        alone = Tokens(TokenInfo(1), plan.model.run())  # its attention is replaced
        alone = in_pass(sublayers_of(layer), alone, weights)
        return run_layer(layer, alone, block, x, LayerInputs(hooks=hooks)).x

    inputs = at_site(corrupted.inputs)
    return by_layer(plan.stack, run, layer, weights_of_layer(weights, layer), inputs)


def remaining(
    plan: SweepPlan,
    weights: Weights,
    corrupted: CorruptedPass,
    layer: Int[Array, ""],
    site: Site,
    token: Float[Array, "batch 1 dim"],
) -> Float[Array, "batch 1 dim"]:
    """Computes the last layer's output at the last token, after the layer of the site.

    Args:
        plan: the static part of the sweep.
        weights: the model's parameters.
        corrupted: the corrupted run.
        layer: index of the patched layer.
        site: the patched site.
        token: the input of the next layer at the site's position.
    """
    first = layer if plan.grid.point == "block.input" else layer + 1

    def over(cached: Slots) -> LayerInputs:
        return LayerInputs(states={"attention": cached})

    def all_tokens(layer: Layer, block: Weights, x: Array, cached: Slots) -> Array:
        tokens = plan.tokens(layer, weights, plan.start)
        return run_layer(layer, tokens, block, x, over(cached)).x

    def last_token(layer: Layer, block: Weights, x: Array, cached: Slots) -> Array:
        cached = store(layer, plan.tokens(layer, weights, plan.start), block, x, cached)
        last = plan.tokens(layer, weights, plan.length - 1)
        return run_layer(layer, last, block, x[:, -1:], over(cached)).x

    def run(layer_of: Callable, index: Any, x: Array) -> Array:
        keys, values = (y[index, :, :, : plan.length] for y in (corrupted.keys, corrupted.values))
        cached = Slots(keys, values)
        return by_layer(plan.stack, layer_of, index, weights_of_layer(weights, index), x, cached)

    x = corrupted.inputs[first, :, plan.start : plan.length]
    x = jax.lax.dynamic_update_slice_in_dim(x, token, site.position - plan.start, axis=1)
    last = len(plan.stack.layers) - 1
    x = jax.lax.fori_loop(first, last, partial(run, all_tokens), x)
    return run(last_token, last, x)


def store(
    layer: Layer, tokens: Tokens, weights: Weights, x: Float[Array, "batch new dim"], cached: Slots
) -> Slots:
    """Returns the slots of a layer with the keys and values of the tokens in x."""
    attention = attention_of(layer)
    normed, context = layer[0].input_of(attention, weights, x), tokens.contexts[attention]
    _, key, value = attention.project(weights["attention"], normed, context)
    return context.store(key, value, cached)[1]
