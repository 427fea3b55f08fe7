"""A sweep of activation patching is the loop over its sites, for every kind of model."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.functional.inputs import Inputs
from jaxformer.interpret import sweep
from jaxformer.interpret.graph import check_is_sum
from jaxformer.interpret.page_weights import live_reason
from jaxformer.interpret.patching import AXES, Grid, LogitDifference, LogProbability
from jaxformer.interpret.sweep import patch_sweep
from tests.properties import tiny
from tests.properties.models import MODELS
from tests.slow import mostly_rare

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH, LENGTH = 2, 4
METRIC = LogitDifference((1, 2), 3, -2)
few = settings(max_examples=max(3, settings().max_examples // 5))

# Sweeps for which `can_resume` is true start at the patch site, the others run the whole model.
# For tiny models, resumed sweeps are cheaper only if compilation costs nothing.
CASES = {
    "llama attention.heads": ("llama", "attention.heads", AXES),
    "llama block.input": ("llama", "block.input", ("layer", "position")),
    "llama feedforward.hidden": ("llama", "feedforward.hidden", ("layer", "position")),
    "post-norm block.middle": ("post-norm", "block.middle", ("layer", "position")),
    "decoder heads together": ("decoder", "attention.heads", ("layer", "position")),
    "decoder attention.key": ("decoder", "attention.key", AXES),
    "decoder attention.weights": ("decoder", "attention.weights", ("layer", "head")),
    "decoder attention.scores": ("decoder", "attention.scores", AXES),
    "decoder norm": ("decoder", "attention_norm.divisor", ("layer", "position")),
    "decoder embedding": ("decoder", "embedding", ("position",)),
    "encoder attention.heads": ("encoder", "attention.heads", AXES),
    "source heads": ("encoder-decoder", "encoder.attention.heads", AXES),
    "cross-attention": ("encoder-decoder", "cross_attention.heads", AXES),
    "lstm recurrent.cell": ("lstm", "recurrent.cell", ("layer", "position")),
    "cnn block.output": ("cnn", "block.output", ("layer", "position")),
}


@pytest.fixture
def free_compilation(monkeypatch):
    monkeypatch.setattr(sweep, "compilation_flops", lambda platform: 0.0)


@cache
def build(name):
    if name == "encoder":
        return tiny.build(jf.EncoderConfig)
    # With three layers, a resumed run has a layer between that of the site and the last one.
    more = {"num_layers": 3} if name == "llama" else {}
    return tiny.build(**{**MODELS[name], **more})


def setup(name, seed):
    """Returns (model, variables, clean inputs, corrupted inputs)."""
    model = build(name)
    pair = []
    for number in (seed, seed + 1):
        source = None
        if model.config.reads_source:
            source = tiny.source(model, number + 7, BATCH, 4)
        pair.append(Inputs(tiny.tokens(number, BATCH, LENGTH), source=source))
    return model, tiny.weights(model, seed), *pair


@cache
def measured(model, point):
    """Compiles (variables, inputs, patch) → the metric, by `inspect`."""

    def run(variables, inputs, patch):
        logits, _ = model.apply(
            variables, inputs.tokens, source=inputs.source, patch=patch, method="inspect"
        )
        return (logits[0, -2, 1] + logits[1, -2, 2] - logits[:, -2, 3].sum()) / 2

    return jax.jit(run)


def looped(model, variables, clean, corrupted, point, axes):
    """Returns the effects by a Python loop over the sites, which are slices of the value."""
    run = measured(model, point)
    _, captured = model.apply(
        variables, clean.tokens, source=clean.source, capture=(point,), method="inspect"
    )
    value = np.asarray(captured[point])
    axis = {"layer": 0, "head": value.ndim - 3, "position": value.ndim - 2}
    sizes = [value.shape[axis[name]] for name in axes]
    effects = np.zeros(sizes)
    for index in np.ndindex(*sizes):
        part = [slice(None)] * value.ndim
        for name, i in zip(axes, index, strict=True):
            part[axis[name]] = i
        where = np.zeros(value.shape, bool)
        where[tuple(part)] = True
        effects[index] = run(variables, corrupted, {point: jf.Patch(where, value)})
    nothing = {point: jf.Patch(np.zeros(value.shape, bool), value)}
    return effects - float(run(variables, corrupted, nothing))


@pytest.mark.slow
@pytest.mark.usefixtures("free_compilation")
@pytest.mark.parametrize("case", mostly_rare(CASES, list(CASES)[-1]))
@few
@given(seed=tiny.seeds)
def test_activation_patching_equals_a_loop_over_patches(case, seed):
    name, point, axes = CASES[case]
    model, variables, clean, corrupted = setup(name, seed)
    found = patch_sweep(model, variables, clean, corrupted, METRIC, point, axes=axes, chunk=3)
    wanted = looped(model, variables, clean, corrupted, point, axes)
    assert found.axes == tuple(axes)
    tiny.close(found.effects, wanted)


@few
@given(seed=tiny.seeds)
def test_patching_all_embeddings_restores_the_clean_metric(seed):
    """A site may be the whole value: it is the only entry of an array without axes."""
    model, variables, clean, corrupted = setup("decoder", seed)
    found = patch_sweep(model, variables, clean, corrupted, METRIC, "embedding", axes=())
    tiny.close(found.effects, found.clean - found.corrupted)
    if abs(found.clean - found.corrupted) > 1e-2:
        tiny.close(found.recovered, 1.0, 1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("free_compilation")
@pytest.mark.parametrize("point", ["attention.heads", "attention.key"])
@few
@given(seed=tiny.seeds)
def test_activation_patching_between_equal_texts_has_no_effect(point, seed):
    model, variables, clean, _ = setup("decoder", seed)
    found = patch_sweep(model, variables, clean, clean, METRIC, point)
    assert found.clean == found.corrupted
    assert abs(found.effects).max() < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("free_compilation")
@pytest.mark.parametrize("point", ["block.output", "attention.value"])
def test_patching_results_do_not_depend_on_the_chunk_size(point):
    model, variables, clean, corrupted = setup("decoder", 0)
    first, *others = (
        patch_sweep(model, variables, clean, corrupted, METRIC, point, chunk=chunk).effects
        for chunk in (1, 2, 100)
    )
    for other in others:
        tiny.close(other, first)


@pytest.mark.slow
@pytest.mark.usefixtures("free_compilation")
def test_patch_sweep_over_heads_reuses_outputs_of_layers_before_the_patch(monkeypatch):
    """Sweeps of points before the attention run the whole model."""
    model, variables, clean, corrupted = setup("decoder", 0)
    grids = []
    original = sweep.resumed_metrics

    def recorded(*arguments):
        grids.append(arguments[2].point)
        return original(*arguments)

    monkeypatch.setattr(sweep, "resumed_metrics", recorded)
    for point in ("attention.heads", "attention.query"):
        patch_sweep(model, variables, clean, corrupted, METRIC, point)
    assert grids == ["attention.heads"]


class Bent(jf.Decoder):
    """A decoder whose head reads another function of the last layer."""

    def forward(self, *arguments, **options):
        passed = super().forward(*arguments, **options)
        return passed._replace(hidden=np.sin(1.0) * passed.hidden**2)


@pytest.mark.slow
def test_patch_sweep_skips_tokens_before_the_patch_only_in_large_models():
    """A program for a start position must save more time than its compilation takes."""
    model, variables, clean, corrupted = setup("decoder", 0)
    sizes = sweep.run_resumed._cache_size()
    patch_sweep(model, variables, clean, corrupted, METRIC)
    assert sweep.run_resumed._cache_size() == sizes
    small = jf.Decoder(jf.DecoderConfig(vocab_size=512, num_layers=4, embed_dim=128, num_heads=4))
    large = jf.Decoder(jf.preset("gpt2-124m"))
    chosen = {}
    for name, some, length in (("small", small, 64), ("large", large, 64), ("long", large, 512)):
        config = some.config
        shape = (config.num_layers, 1, config.num_heads, length, config.head_dim or 64)
        grid = Grid("attention.heads", AXES, shape, True, True)
        chosen[name] = sweep.choose_starts(some, grid, length, 1)
    assert chosen == {"small": 0, "large": 8, "long": 8}


@pytest.mark.slow
def test_patch_sweep_uses_the_forward_pass_of_a_user_defined_model():
    plain, variables, clean, corrupted = setup("decoder", 0)
    model, point = Bent(plain.config), "attention.heads"
    found = patch_sweep(model, variables, clean, corrupted, METRIC, point)
    tiny.close(found.effects, looped(model, variables, clean, corrupted, point, AXES))
    with pytest.raises(ValueError, match="model is a Bent; path patching requires a Decoder"):
        check_is_sum(model)
    assert live_reason(model, variables).endswith("not Bent")


@pytest.mark.slow
@pytest.mark.usefixtures("free_compilation")
def test_patch_sweep_reports_progress_and_compiles_few_programs():
    """Another metric, other texts and other weights compile nothing."""
    model, variables, clean, corrupted = setup("llama", 0)
    calls = []
    sizes = sweep.run_resumed._cache_size()
    for metric in (METRIC, LogitDifference((3, 1), 2, -2)):
        patch_sweep(
            model, variables, clean, corrupted, metric, on_progress=lambda *x: calls.append(x)
        )
        if metric is METRIC:
            added = sweep.run_resumed._cache_size() - sizes
    assert calls[-1] == (3 * 4 * LENGTH, 3 * 4 * LENGTH)
    assert [done for done, _ in calls[: len(calls) // 2]] == sorted(
        done for done, _ in calls[: len(calls) // 2]
    )
    assert sweep.run_resumed._cache_size() == sizes + added
    assert added <= LENGTH + 1  # one for each start, and one for the last layer


@pytest.mark.slow
def test_log_probability_metric_equals_log_softmax_of_given_token():
    model, variables, clean, corrupted = setup("decoder", 3)
    found = patch_sweep(model, variables, clean, corrupted, LogProbability(4), "embedding", axes=())
    logits = model.apply(variables, clean.tokens)
    tiny.close(found.clean, np.asarray(jax.nn.log_softmax(logits[:, -1]))[:, 4].mean())


class NamedMetric(NamedTuple):
    position: int

    def __call__(self, logits):
        return logits[0, 0]


@dataclass(frozen=True)
class Unregistered:
    position: int

    def __call__(self, logits):
        return logits[0, 0]


TOKENS = np.ones((BATCH, LENGTH), np.int32)
WRONG = {
    "no hook point is named 'attention.head'; did you mean attention.heads": {
        "point": "attention.head"
    },
    r"axes are \('head',\); for the hook point 'block.input' they must be .* layer, position": {
        "point": "block.input",
        "axes": ("head",),
    },
    r"axes are \('layer',\); for the hook point 'embedding' .* from position": {
        "point": "embedding",
        "axes": ("layer",),
    },
    "axes are 'head'": {"axes": "head"},
    r"axes are \('row',\)": {"axes": ("row",)},
    r"tokens has shape \(2, 3\) in clean and \(2, 4\) in corrupted": {"clean": TOKENS[:, 1:]},
    r"clean has shape \(4,\); it must be int \[batch, length\]": {"clean": TOKENS[0]},
    "tokens contain id 13, but vocab_size is 13": {"corrupted": 13 * TOKENS},
    "chunk is 0": {"chunk": 0},
    r"metric returns an array of shape \(13,\)": {"metric": lambda logits: logits[0, 0]},
    "metric is an Inputs": {"metric": Inputs(TOKENS)},
    "metric is a NamedMetric": {"metric": NamedMetric(1)},
    "metric is a Unregistered": {"metric": Unregistered(1)},
    "metric.position is 4; it must be a whole number from -4 to 3": {
        "metric": LogitDifference(1, 2, 4)
    },
    "metric.right is 13; it must be a token id from 0 to 12": {"metric": LogitDifference(13, 2)},
    r"metric.token is \(1, 2, 3\)": {"metric": LogProbability((1, 2, 3))},
    "segment_ids of clean and corrupted differ": {
        "clean": Inputs(TOKENS, np.ones_like(TOKENS)),
        "corrupted": Inputs(TOKENS, 2 * np.ones_like(TOKENS)),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_patch_sweep_raises_error_that_names_the_invalid_argument(message):
    model = build("decoder")
    given = {"clean": TOKENS, "corrupted": TOKENS, "metric": METRIC, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        patch_sweep(model, tiny.weights(model, 0), **given)


@pytest.mark.slow
@few
@given(seed=tiny.seeds)
def test_patching_metric_may_be_a_function_of_all_logits(seed):
    """In activation patching of heads, and of the embedding."""
    model, variables, clean, corrupted = setup("llama", seed)

    def difference(logits):
        right = logits[np.arange(BATCH), -2, np.array(METRIC.right)]
        return (right - logits[:, -2, METRIC.wrong]).mean()

    for point in ("attention.heads", "embedding"):
        arguments = (model, variables, clean, corrupted)
        found = patch_sweep(*arguments, difference, point)
        expected = patch_sweep(*arguments, METRIC, point)
        tiny.close(found.effects, expected.effects, 3e-5)
        assert abs(found.clean - expected.clean) < 1e-4
    with pytest.raises(ValueError, match=r"metric returns an array of shape \(2, 4\)"):
        patch_sweep(*arguments, lambda logits: logits[..., 0])
