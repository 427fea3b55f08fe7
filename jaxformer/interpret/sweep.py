"""Activation patching over every layer, head and position of a hook point.

A sweep runs a model on a corrupted text once per patch site. A patch site is a combination of
layer, head and position. Each run replaces the activation at one patch site by the activation from
a clean text. The change of a metric measures the effect of the replaced activation.

Patching layer l at position p does not change layers before l or positions before p. For a causal
Transformer, each run therefore recomputes only the values after the patch site, and takes all other
values from the corrupted run. If the patch site comes after the attention of layer l, the patch
changes the output of layer l only at p. The forward pass for one patch site has three steps:

1. Layer l computes its output only at p.
2. The layers after l compute their outputs from position s ≤ p to the metric's position. Tokens
   before s have the keys and values of the corrupted run.
3. The last layer computes its keys and values from position s on, but its output only at the
   metric's position.

s is one of a few positions, so that few shapes are compiled. The loop over layers starts at a
traced index, so one compiled program serves all layers.

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
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import Slots
from jaxformer.functional.cache.table import TableView
from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer, LayerInputs, run_layer
from jaxformer.functional.layers.sublayer import with_contexts
from jaxformer.functional.sequence_size import SequenceSize
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    by_layer,
    mixed_layers,
    project,
    self_attention_layer,
)
from jaxformer.interpret.patching import (
    AnyMetric,
    FunctionMetric,
    Grid,
    Metric,
    Site,
    checked_grid,
    checked_metric,
    checked_pair,
    fraction_of_gap,
    is_at,
    measure,
    pad_sites,
    run_metric,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.autoregressive import unsupported_reason
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.flops import stack_flops
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel, Variables

OnProgress = Callable[[int, int], Any]
# One compiled call runs at most this many chunks. `on_progress` is called after each compiled call.
_CHUNKS_PER_CALL = 8
_RESUMED_POINTS = ("block.input", "attention.heads", "attention.output", "block.middle")
_RESUMED_POINTS += ("feedforward.hidden", "feedforward.output", "block.output")


class Sweep(NamedTuple):
    """Result of `patch_sweep`.

    Attributes:
        effects: float32, one axis per name in `axes`: the metric of the patched run minus the
            metric of the corrupted run.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
        axes: the names of the axes of `effects`.
    """

    effects: Float[np.ndarray, "..."]
    clean: float
    corrupted: float
    axes: tuple[str, ...]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def recovered(self) -> Float[np.ndarray, "..."]:
        """The effects divided by `clean` − `corrupted`; 1 if a patch restores the clean metric.

        NaN if `clean` equals `corrupted`.
        """
        return fraction_of_gap(self.effects, self.clean, self.corrupted)


class SweepState(NamedTuple):
    """Arguments that are equal for all patch sites.

    Attributes:
        weights: the model's parameters.
        inputs: the corrupted text.
        metric: the metric.
        value: the clean text's activations at the hook point.
        base: the metric of the corrupted run.
        corrupted: values of the corrupted run by hook point; the first axis is the layer.
    """

    weights: Weights
    inputs: Inputs
    metric: Metric
    value: Shaped[Array, "..."]
    base: Float[Array, ""]
    corrupted: dict[str, Array]


def patch_sweep(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
    point: str = "attention.heads",
    *,
    axes: Iterable[str] | None = None,
    chunk: int = 32,
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Measures the effect of each patch site of a hook point on a metric (activation patching).

    Each forward pass uses the corrupted text, and replaces the activation at one patch site by the
    clean activation. For a large causal Transformer without padding, the pass recomputes only the
    layers and positions after the patch site. This requires a metric of the logits at one position,
    the names "layer" and "position" in `axes`, and a hook point that is "block.input" or one from
    "attention.heads" to "block.output". All other sweeps run the whole model for each patch site,
    with equal results up to rounding. `choose_starts` compares the costs.

    Args:
        model: any model.
        variables: the model's variables.
        clean: the clean text: int [batch, length], or `functional.inputs.Inputs` with a source,
            segment ids or token type ids.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        metric: a function of the logits [batch, length, vocab], or a metric of the logits at one
            position, such as `LogitDifference`.
        point: name of a hook point, from `model.hook_points`.
        axes: the axes along which patch sites differ, from "layer", "head" and "position". A patch
            site covers all entries of the remaining axes. Defaults to all axes of the hook point.
        chunk: the maximum number of forward passes at the same time. Memory is proportional to
            `chunk`.
        on_progress: called with (number of measured patch sites, total number of patch sites).

    Raises:
        ValueError: An argument is invalid.
    """
    model.check(variables)
    chunk = whole_number("chunk", chunk, 1)
    read, changed = checked_pair(clean, corrupted, model.config)
    measured = checked_metric(metric, changed, model.config.vocab_size)
    weights = variables["params"]
    grid = checked_grid(model, point, axes, weights, changed)
    starts = 0
    if can_resume(model, changed, grid) and not isinstance(measured, FunctionMetric):
        starts = choose_starts(model, grid, measured.position + 1, len(changed.tokens))
    names = dict.fromkeys((*_RESUMED_VALUES, point)) if starts else ()
    clean_metric, captured = measure(model, weights, read, measured, Hooks((point,)))
    base, values = measure(model, weights, changed, measured, Hooks(tuple(names)))
    state = SweepState(weights, changed, measured, captured[point], base, values)
    run = partial(resumed_metrics, starts) if starts else whole_metrics
    metrics = run(model, grid, state, chunk, on_progress or (lambda done, total: None))
    return Sweep(metrics - np.float32(base), float(clean_metric), float(base), grid.axes)


def whole_metrics(
    model: LanguageModel, grid: Grid, state: SweepState, chunk: int, report: OnProgress
) -> Float[np.ndarray, "..."]:
    """Computes the metric for every patch site by forward passes of the whole model."""
    sites = grid.sites()
    total, found = len(sites.layer), []
    chunk = min(chunk, total)
    size = min(chunk * _CHUNKS_PER_CALL, total + -total % chunk)
    padded = pad_sites(sites, size)
    for first in range(0, total, size):
        some = Site(*(x[first : first + size] for x in padded))
        found.append(np.asarray(run_whole(model, grid, state, some, chunk)))
        report(min(first + size, total), total)
    return np.concatenate(found)[:total].reshape(grid.sizes)


@partial(jax.jit, static_argnames=("model", "grid", "chunk"))
def run_whole(
    model: LanguageModel, grid: Grid, state: SweepState, sites: Site, chunk: int
) -> Float[Array, " sites"]:
    """Computes the metric once per patch site, with the clean activation at this site."""

    def patched(site: Site) -> Float[Array, ""]:
        hooks = Hooks(patch={grid.point: Patch(grid.where(site), state.value)})
        return run_metric(model, state.weights, state.inputs, state.metric, hooks)[0]

    return jax.lax.map(patched, jax.tree.map(jnp.asarray, sites), batch_size=chunk)


# ---- Runs that recompute only the values after the patch site.

_RESUMED_VALUES = ("block.input", "block.output", "attention.key", "attention.value")
_RESUMED_VALUES += ("attention.heads",)


def can_resume(model: LanguageModel, inputs: Inputs, grid: Grid) -> bool:
    """Returns whether it is enough to recompute the values after each patch site."""
    return (
        type(model) is Decoder
        and model.layers is None
        and mixed_layers(model) is None
        and "attention.heads" in model.layer_hook_points
        and unsupported_reason(model) is None
        and model.minimum_prefill == 1
        and inputs.segment_ids is None
        and grid.point in _RESUMED_POINTS
        and {"layer", "position"} <= set(grid.axes)
    )


def choose_starts(model: LanguageModel, grid: Grid, length: int, batch_size: int) -> int:
    """Returns the number of start positions with the lowest cost, or 0 for whole forward passes.

    Each start position needs a compiled program. With more start positions, the runs recompute
    fewer tokens before the patch site. The cost is the FLOPs of all runs, plus the cost of the
    compilations.

    Args:
        model: the model.
        grid: all patch sites.
        length: number of tokens up to the position of the metric.
        batch_size: number of texts.
    """
    num_layers, whole_length = grid.shape[0], grid.shape[-2]
    of_text = stack_flops(model.architecture.stack, SequenceSize(whole_length, 0))
    of_token = batch_size * of_text / (num_layers * whole_length)  # in one layer
    heads = grid.shape[-3] if "head" in grid.axes else 1
    compilation = compilation_flops(jax.default_backend())
    costs = {0: compilation + heads * (num_layers * whole_length) ** 2 * of_token}
    # Total number of layers that the runs of one position recompute.
    layers = num_layers * (num_layers - 1) / 2
    for starts in (1, 2, 4, 8):
        step = -(-length // starts)
        tokens = sum(length - position // step * step for position in range(length))
        # On two cores, each start position from the fifth to the eighth took 1.2 to 1.7 s, mostly
        # for compilation (experiments/bench_short_cut.py).
        costs[starts] = 2 * starts * compilation + heads * layers * tokens * of_token
    return min(costs, key=lambda starts: costs[starts])


def compilation_flops(platform: str) -> float:
    """Returns the FLOPs that a device computes while a program is compiled.

    The number for a CPU makes `choose_starts` choose the fastest variant for the three models that
    experiments/bench_short_cut.py measures on two cores. The number for an accelerator is an
    assumption: 1 s of compilation at 10¹⁴ FLOP/s.
    """
    return 1e11 if platform == "cpu" else 1e14


def resumed_metrics(
    starts: int,
    model: LanguageModel,
    grid: Grid,
    state: SweepState,
    chunk: int,
    report: OnProgress,
) -> Float[np.ndarray, "..."]:
    """Computes the metric for every patch site; each run recomputes only values after its site.

    Args:
        starts: number of start positions; see `choose_starts`.
        model: the model.
        grid: all patch sites.
        state: the arguments that are equal for all patch sites.
        chunk: the maximum number of forward passes at the same time.
        report: called with (number of measured patch sites, total number of patch sites).
    """
    length, num_layers = state.metric.position + 1, grid.shape[0]
    metrics = np.full(grid.sizes, state.base, np.float32)
    by_layer = np.moveaxis(metrics, -1, 1)  # [layers, positions, *heads]
    step = -(-length // starts)
    heads = range(grid.shape[-3]) if "head" in grid.axes else (-1,)
    calls = [(layer, start) for start in range(0, length, step) for layer in range(num_layers)]
    for done, (layer, start) in enumerate(calls, 1):
        positions = range(start, min(start + step, length))
        at = np.array([(layer, h, p) for p in positions for h in heads], np.int32)
        size = min(chunk, len(at))
        sites = pad_sites(Site(*at.T), size)
        found = run_resumed(model, grid, (start, length), state, np.int32(layer), sites, size)
        found = np.asarray(found)[: len(at)].reshape(len(positions), *by_layer.shape[2:])
        by_layer[layer, positions.start : positions.stop] = found
        report(done * metrics.size // len(calls), metrics.size)
    return metrics


@partial(jax.jit, static_argnames=("model", "grid", "span", "chunk"))
def run_resumed(
    model: LanguageModel,
    grid: Grid,
    span: tuple[int, int],
    state: SweepState,
    layer: Int[Array, ""],
    sites: Site,
    chunk: int,
) -> Float[Array, " sites"]:
    """Computes the metric for patch sites of one layer.

    Args:
        model: the model.
        grid: all patch sites.
        span: (start, stop) of the recomputed positions, which end with the metric's position.
        state: the arguments that are equal for all patch sites.
        layer: index of the layer.
        sites: patch sites of the layer, at positions in `span`.
        chunk: the maximum number of forward passes at the same time.
    """
    first = layer if grid.point == "block.input" else layer + 1

    def patched(site: Site) -> Float[Array, ""]:
        token = patched_token(model, grid, state, layer, site)
        hidden = remaining_layers(model, span, state, first, (site.position, token))
        hidden = model.architecture.finish(state.weights, hidden)
        return state.metric(model.logits(state.weights, hidden)[:, 0])

    return jax.lax.map(patched, jax.tree.map(jnp.asarray, sites), batch_size=chunk)


def patched_token(
    model: LanguageModel, grid: Grid, state: SweepState, layer: Int[Array, ""], site: Site
) -> Float[Array, "batch 1 dim"]:
    """Computes the output of the patched layer at the patched position.

    For the hook point "block.input", the function returns the layer's patched input, not its
    output. The outputs of the attention heads come from the corrupted run, so the layer needs
    to process only one token.
    """
    stack, weights, corrupted = model.architecture.stack, state.weights, state.corrupted

    def at_site(x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.lax.dynamic_slice_in_dim(x[layer], site.position, 1, axis=-2)

    where = is_at(site.head, grid.shape[-3])[:, None, None] if grid.has_heads else True
    new = jnp.where(where, at_site(state.value), at_site(corrupted[grid.point]))
    if grid.point == "block.input":
        return new
    replaced = {"attention.heads": at_site(corrupted["attention.heads"]), grid.point: new}
    hooks = Hooks(patch={name: Patch(True, x) for name, x in replaced.items()})
    alone = with_contexts(stack.sublayers, Tokens(TokenInfo(1), model.run()), weights)

    def run(layer: Layer, block: Weights, x: Float[Array, "batch 1 dim"]) -> Array:
        return run_layer(layer, alone, block, x, LayerInputs(hooks=hooks)).x

    inputs = at_site(corrupted["block.input"])
    return by_layer(stack, weights, run, layer, inputs)


def remaining_layers(
    model: LanguageModel,
    span: tuple[int, int],
    state: SweepState,
    first: Int[Array, ""],
    patched: tuple[Int[Array | np.ndarray, ""], Float[Array, "batch 1 dim"]],
) -> Float[Array, "batch 1 dim"]:
    """Runs the layers from `first` on, and returns the last layer's output at the last token.

    Args:
        model: the model.
        span: see `run_resumed`.
        state: the arguments that are equal for all patch sites.
        first: index of the first layer to run; `num_layers` if the last layer is patched.
        patched: (position, value) of the patched token in the input of layer `first`.
    """
    (start, length), (position, token) = span, patched
    stack, corrupted = model.architecture.stack, state.corrupted
    num_layers = len(stack.layers)

    def tokens_from(begin: int) -> Tokens:
        """Returns the tokens from position `begin` on, with attention to the whole sequence."""
        new = TokenInfo(length - begin, jnp.arange(begin, length, dtype=jnp.int32))
        view = TableView(TokenInfo(length), jnp.int32(begin))
        return with_contexts(stack.sublayers, Tokens(new, model.run(), {None: view}), state.weights)

    tokens, last_token = tokens_from(start), tokens_from(length - 1)

    def over(slots: Slots) -> LayerInputs:
        return LayerInputs(states={"attention": slots})

    def all_tokens(layer: Layer, block: Weights, x: Array, slots: Slots) -> Array:
        return run_layer(layer, tokens, block, x, over(slots)).x

    def only_last(layer: Layer, block: Weights, x: Array, slots: Slots) -> Array:
        _, key, value = project(layer, tokens, block, x)
        _, slots = tokens.contexts[self_attention_layer(layer)].store(key, value, slots)
        return run_layer(layer, last_token, block, x[:, -1:], over(slots)).x

    def run(function: Callable[..., Array], index: Any, x: Array) -> Array:
        names = ("attention.key", "attention.value")
        keys, values = (corrupted[name][index, :, :, :length] for name in names)
        slots = Slots(keys, values)
        return by_layer(stack, state.weights, function, index, x, slots)

    x = jnp.where(
        first < num_layers, corrupted["block.input"][first], corrupted["block.output"][-1]
    )
    x = jax.lax.dynamic_update_slice_in_dim(x[:, start:length], token, position - start, axis=1)
    x = jax.lax.fori_loop(first, num_layers - 1, partial(run, all_tokens), x)
    last = partial(run, only_last, num_layers - 1)
    return jax.lax.cond(first < num_layers, last, lambda x: x[:, -1:], x)
