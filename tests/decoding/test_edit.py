"""Edits at hook points compute their function in one pass, in cached chunks and in `generate`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.hooks import Patch
from tests.decoding.test_inspect import CHANGED, GREEDY, in_chunks, own_points, setup
from tests.errors import error_of
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.properties.models import MODELS, each_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
few = settings(max_examples=max(4, settings().max_examples // 5))
BATCH, LENGTH, NEW = 2, tiny.LENGTH, 4


def twist(value, at, shift):
    """A function of the value, of its layer and of the positions of its tokens.

    The factor differs between features, because a norm would undo a common factor.
    """
    layer = 0 if at.layer is None else at.layer
    turn = jnp.sin(jnp.broadcast_to(at.positions, value.shape[:1] + value.shape[-2:-1]) + layer)
    turn = turn.reshape(len(value), *[1] * (value.ndim - 3), -1, 1)
    odd = jnp.arange(1, value.shape[-1] + 1) % 2
    return value * (1 + 0.1 * turn * odd) + shift * turn * odd


def keep(value, at):
    return value


def replace_by(value, at, new):
    return jnp.broadcast_to(new, value.shape)


def add(value, at, vector):
    return value + vector


def without_function():
    edit = jf.Edit(keep)
    edit.function = "keep"
    return edit


@pytest.mark.slow
@each_model("decoder")
@few
@given(seed=tiny.seeds, chunks=cuts(), data=st.data())
def test_edit_gives_equal_results_with_and_without_cache(name, seed, chunks, data):
    """One pass, cached chunks, and greedy generation, at any hook point of any model."""
    model, variables, source = setup(name, seed)
    tokens = tiny.tokens(seed, BATCH, LENGTH)
    # The position of a key in the last axis of scores and weights differs in a cache.
    without = ("attention.scores", "attention.weights", "final_norm")
    points = [x for x in own_points(model) if x not in without]
    point = data.draw(st.sampled_from(points))
    patch = {point: jf.Edit(twist, jnp.float32(0.3))}
    whole = jf.inspect(model, variables, tokens, source=source, patch=patch)
    plain = jf.inspect(model, variables, tokens, source=source)
    assert abs(np.asarray(whole.logits) - plain.logits).max() > 1e-4
    logits, _ = in_chunks(model, variables, tokens, chunks, source, patch=patch)
    tiny.close(logits, whole.logits, 3e-5)
    out = jf.generate(
        model,
        variables,
        tokens[:, :5],
        max_new_tokens=NEW,
        sampler=GREEDY,
        source=source,
        patch=patch,
    )
    text = np.concatenate([tokens[:, :5], np.asarray(out.tokens)], axis=1)
    seen = jf.inspect(model, variables, text[:, :-1], source=source, patch=patch)
    log_probs = jax.nn.log_softmax(seen.logits[:, 4:])
    chosen = np.take_along_axis(np.asarray(log_probs), np.asarray(out.tokens)[..., None], 2)[..., 0]
    tiny.close(out.log_probs, chosen, 3e-5)


@pytest.mark.slow
@each_model("decoder")
@few
@given(seed=tiny.seeds)
def test_edit_that_returns_the_value_leaves_logits_bitwise_equal(name, seed):
    model, variables, source = setup(name, seed)
    tokens = tiny.tokens(seed, BATCH, LENGTH)
    plain = jf.inspect(model, variables, tokens, source=source).logits
    for point in own_points(model):
        # A change of scores, weights or divisors selects another implementation.
        if point.endswith((".scores", ".weights", ".divisor")):
            continue
        patch = {point: jf.Edit(keep)}
        found = jf.inspect(model, variables, tokens, source=source, patch=patch).logits
        np.testing.assert_array_equal(found, plain)


@pytest.mark.slow
@settings(max_examples=3)
@given(
    seed=tiny.seeds,
    layer=st.integers(0, 3),
    positions=st.sampled_from([None, [2], [0, 5]]),
    scan=st.sampled_from(["scan", "unrolled"]),
)
def test_edit_that_returns_an_array_equals_a_patch(seed, layer, positions, scan):
    """At one layer of four, at some positions of packed documents with padding."""
    model = tiny.build(num_layers=4, layers=scan)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, LENGTH)
    segment_ids = np.array([[1] * 6 + [2] * 6, [0, 0, *[1] * 10]])
    new = tiny.embeddings(seed, 8)
    where = (np.arange(4) == layer)[:, None, None, None]
    patch = {"block.middle": Patch(where, new[None, None, None], positions)}
    edit = {"block.middle": jf.Edit(replace_by, new, layers=(layer,), positions=positions)}
    found, expected = (
        jf.inspect(model, variables, tokens, segment_ids=segment_ids, patch=x).logits
        for x in (edit, patch)
    )
    is_real = segment_ids != 0
    tiny.close(found, expected, where=is_real)
    plain = jf.inspect(model, variables, tokens, segment_ids=segment_ids).logits
    assert abs(np.asarray(found - plain))[is_real].max() > 1e-3


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds, step=st.integers(0, NEW - 1))
def test_edit_at_a_generation_step_equals_a_patch_at_this_step(seed, step):
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 5)
    new = 3 * tiny.embeddings(seed, 8)
    generate = partial(jf.generate, model, variables, tokens, max_new_tokens=NEW, sampler=GREEDY)
    found = generate(patch={"final_norm": jf.Edit(replace_by, new, steps=[step])})
    expected = generate(patch={"final_norm": Patch(True, new, steps=[step])})
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    tiny.close(found.log_probs, expected.log_probs)
    everywhere = generate(patch={"final_norm": jf.Edit(replace_by, new)})
    assert abs(np.asarray(everywhere.log_probs - found.log_probs)).max() > 1e-3


@pytest.mark.slow
@settings(max_examples=2)
@given(seed=tiny.seeds)
def test_gradient_of_an_edit_equals_finite_differences(seed):
    """The gradient flows to the arrays of the edit through a scan over four layers."""
    model = tiny.build(num_layers=4, layers="scan")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, LENGTH)
    vector, direction = tiny.embeddings(seed, 8), tiny.embeddings(seed + 1, 8)

    def loss(vector):
        edit = jf.Edit(add, vector, layers=(1, 2))
        patch = {"block.output": edit}
        return model.apply(variables, tokens, patch=patch, method="inspect")[0].var()

    slope = jnp.vdot(jax.grad(loss)(vector), direction)
    step = 1e-2
    ahead, behind = (loss(vector + sign * step * direction) for sign in (1, -1))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=0.02, atol=2e-3)


@pytest.mark.slow
def test_arrays_of_an_edit_are_not_copied_for_each_layer_of_a_scan():
    model = tiny.build(num_layers=4, layers="scan")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 6)
    patch = {"block.output": jf.Edit(add, jnp.zeros((77, 1, 1, 8)).sum(axis=0))}

    def run(large):
        def of_large(value, at, large):
            return value + large[:6, 0]

        patch = {"block.output": jf.Edit(of_large, large)}
        return model.apply(variables, tokens, patch=patch, method="inspect")[0]

    program = str(jax.make_jaxpr(run)(jnp.zeros((77, 5, 8))))
    assert "f32[77,5,8]" in program and "f32[4,77,5,8]" not in program
    model.apply(variables, tokens, patch=patch, method="inspect")


@settings(max_examples=5)
@given(seed=tiny.seeds, layer=st.integers(0, 1), head=st.integers(0, 3))
def test_ablating_a_head_equals_zeroing_its_rows_of_the_output_kernel(seed, layer, head):
    """The rows of W_O that read the head are zero."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, LENGTH)
    patch = jf.ablate("attention.heads", layer=layer, head=head)
    found = jf.inspect(model, variables, tokens, patch=patch).logits
    blocks = variables["params"]["blocks"]
    rows = slice(4 * head, 4 * head + 4)
    output = blocks["attention"]["output"]
    kernel = output["kernel"].at[layer, rows].set(0)
    attention = {**blocks["attention"], "output": {**output, "kernel": kernel}}
    params = {**variables["params"], "blocks": {**blocks, "attention": attention}}
    tiny.close(found, tiny.apply(model)({"params": params}, tokens))
    whole = jf.inspect(model, variables, tokens, patch=jf.ablate("attention.output"))
    zeros = {"attention.output": Patch(np.ones((1, 1), bool), np.zeros((1, 1)))}
    tiny.close(whole.logits, jf.inspect(model, variables, tokens, patch=zeros).logits)


@pytest.mark.parametrize(
    "patch, message",
    [
        ({"block.output": jf.Edit(keep, layers=(2,))}, "layers contain 2; the layers with this"),
        ({"block.output": jf.Edit(keep, layers=(-1,))}, "layers is -1"),
        ({"embedding": jf.Edit(keep, layers=(0,))}, "the hook point is outside the layers"),
        ({"block.output": jf.Edit(lambda value, at: value[0])}, "returns an array of shape"),
        ({"block.output": without_function()}, "the first argument of Edit is a str"),
        ({"block.output": jf.Edit(keep, positions=[9])}, "positions contain 9"),
        ({"block.output": jf.Edit(keep, steps=[0])}, "has steps, which only jf.generate accepts"),
        ({"block.output": 0.0}, "it must be a Patch(where, value) or an Edit(function, *arrays)"),
        (jf.ablate("attention.heads", head=4), "head is 4; the value has the shape"),
        (jf.ablate("attention.head", head=0), "no hook point is named 'attention.head'"),
    ],
)
def test_invalid_edits_are_refused(patch, message):
    model = tiny.build(**MODELS["decoder"])
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 6)
    assert message in error_of(lambda: jf.inspect(model, variables, tokens, patch=patch))


@pytest.mark.slow
def test_edit_is_applied_at_the_same_points_that_a_patch_changes():
    """`CHANGED` names one point for each kind of model."""
    for kind, point in CHANGED.items():
        model = tiny.build(kind)
        variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 6)
        source = tiny.sources(model, 0, 1)
        zeros = jf.inspect(model, variables, tokens, source=source, patch=jf.ablate(point))
        patch = {point: Patch(np.ones((1, 1), bool), np.zeros((1, 1)))}
        expected = jf.inspect(model, variables, tokens, source=source, patch=patch)
        tiny.close(zeros.logits, expected.logits)
