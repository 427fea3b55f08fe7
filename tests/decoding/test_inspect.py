"""Hooks capture and patch the same values in every mode, for every model.

The modes are one forward pass, chunks with a cache, and the compiled loop of `generate`.
"""

from collections import defaultdict
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding.steps import MASKED_VALUES
from jaxformer.functional.hooks import Patch
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.properties.models import MODELS, each_model
from tests.slow import mostly_rare

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH, LENGTH, NEW = 2, tiny.LENGTH, 4
GREEDY = jf.Sampler(temperature=0.0)
few = settings(max_examples=max(4, settings().max_examples // 5))  # an example runs several loops
CHANGED = defaultdict(lambda: "block.output")  # the point to patch for each kind of model
CHANGED |= {
    jf.DecoderConfig: "block.middle",
    jf.EncoderDecoderConfig: "block.crossed",
    jf.RecurrentConfig: "recurrent.hidden",
    jf.RecurrentEncoderDecoderConfig: "recurrent.hidden",
}


def setup(name, seed):
    model = tiny.build(**MODELS[name])
    return model, tiny.weights(model, seed), tiny.sources(model, seed, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", mostly_rare([[-1], [10**9], [0, 6]], [0, 6]))
def test_patch_at_missing_position_or_step_is_rejected(wrong):
    """A patch at a position or step that does not exist would have no effect.

    A text of 6 tokens has the positions 0 to 5. With a prompt of 4 tokens and 3 new tokens,
    `generate` also has 6 positions, because the last token is never an input.
    """
    model = tiny.build(num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 6)

    def patch(positions):
        return {"block.output": Patch(np.ones((1, 1), bool), np.zeros((1, 1)), positions)}

    def run(positions, tokens=tokens, segment_ids=None):
        jf.inspect(model, variables, tokens, segment_ids=segment_ids, patch=patch(positions))

    def in_cache(positions):
        cache = jf.init_cache(model, variables, 1, 6)
        jf.inspect(model, variables, tokens[:, :2], cache, patch=patch(positions))

    def generated(positions=None, steps=None):
        patches = {"embedding": Patch(True, 0.0, positions, steps)}
        how = {"max_new_tokens": 3, "sampler": GREEDY, "patch": patches}
        jf.generate(model, variables, tokens[:, :4], **how)

    padded = np.array([[0, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
    calls = (
        run,
        lambda x: model.apply(variables, tokens, patch=patch(x), method="inspect"),
        lambda x: run(x, tiny.tokens(0, 1, 10), padded),
        in_cache,
        generated,
    )
    for call in calls:
        call([5])
        with pytest.raises(ValueError, match=r"positions contain -?\d+; .* in 0 … 5 \(the tok"):
            call(wrong)
    generated(steps=[2])
    with pytest.raises(ValueError, match=r"steps contain -?\d+; .* in 0 … 2 \(the gen"):
        generated(steps=wrong)


def own_points(model):
    """Returns the hook points of a model, without the hook points of its source encoder."""
    return tuple(name for name in model.hook_points if not name.startswith("encoder."))


def in_chunks(model, variables, tokens, chunks, source, **hooks):
    """Runs the model chunk by chunk; returns (logits, captured)."""
    kept, parts, start = jf.init_cache(model, variables, len(tokens), LENGTH, source), [], 0
    for size in chunks:
        some = tokens[:, start : start + size]
        seen = jf.inspect(model, variables, some, kept, **hooks)
        kept, start = seen.cache, start + size
        parts.append(seen)
    captured = {}
    for name in hooks.get("capture", ()):
        found = [part.captured[name] for part in parts]
        if name in MASKED_VALUES:  # the keys of a chunk are the live slots
            masked = MASKED_VALUES[name]
            found = [np.asarray(x)[..., :LENGTH] for x in found]
            widths = [[(0, 0)] * 4 + [(0, LENGTH - x.shape[-1])] for x in found]
            found = [
                np.pad(x, w, constant_values=masked) for x, w in zip(found, widths, strict=True)
            ]
        captured[name] = np.concatenate(found, axis=-2)
    return np.concatenate([part.logits for part in parts], axis=1), captured


@pytest.mark.slow
@each_model("decoder")
@few
@given(seed=tiny.seeds, chunks=cuts())
def test_cached_chunks_capture_the_same_values_as_a_single_pass(name, seed, chunks):
    """Chunks of any lengths capture all hook points, without changing the logits."""
    model, variables, source = setup(name, seed)
    tokens, points = tiny.tokens(seed, BATCH, LENGTH), own_points(model)
    whole = jf.inspect(model, variables, tokens, source=source, capture=points)
    assert whole.cache is None and set(whole.captured) == set(points)
    logits, captured = in_chunks(model, variables, tokens, chunks, source, capture=points)
    tiny.close(logits, whole.logits)
    for point in points:
        tiny.close(captured[point], whole.captured[point])
    tiny.close(whole.logits, tiny.apply(model)(variables, tokens, **tiny.read(model, source)))


@each_model()
@few
@given(seed=tiny.seeds)
def test_generate_captures_the_same_values_as_a_single_pass(name, seed):
    """Step t captures the values at the token before the t-th generated token.

    The prompts have different lengths. The key axis of attention has the text's positions.
    """
    model, variables, source = setup(name, seed)
    prompts, points = [tiny.tokens(seed, 3), tiny.tokens(seed + 1, 7)], model.hook_points
    how = {"max_new_tokens": NEW, "source": source}
    out = jf.generate(model, variables, prompts, sampler=GREEDY, capture=points, **how)
    plain = jf.generate(model, variables, prompts, sampler=GREEDY, **how)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert plain.captured == {}
    for index, prompt in enumerate(prompts):
        text = np.concatenate([prompt, out.tokens[index, :-1]])[None]
        own = None if source is None else source[index : index + 1]
        whole = jf.inspect(model, variables, text, source=own, capture=points).captured
        for point in own_points(model):
            batch_axis = 1 if point in model.layer_hook_points else 0
            found = np.take(out.captured[point], index, axis=batch_axis)
            wanted = np.take(np.asarray(whole[point]), 0, axis=batch_axis)[..., -NEW:, :]
            wanted = np.moveaxis(wanted, -2, batch_axis)
            if point in MASKED_VALUES:
                assert (found[..., text.shape[1] :] == MASKED_VALUES[point]).all()
                found = found[..., : text.shape[1]]
            tiny.close(found, wanted)


@pytest.mark.slow
def test_generate_captures_encoder_values_once():
    """`generate` captures encoder values once, and these equal the values of a full pass."""
    model, variables, source = setup("encoder-decoder", 0)
    points = tuple(name for name in model.hook_points if name.startswith("encoder."))
    prompts = tiny.tokens(0, BATCH, 3)
    out = jf.generate(
        model, variables, prompts, sampler=GREEDY, max_new_tokens=2, source=source, capture=points
    )
    whole = jf.inspect(model, variables, prompts, source=source, capture=points)
    tiny.all_close(out.captured, jax.tree.map(np.asarray, whole.captured))
    assert set(out.captured) == set(points) and "encoder.attention.weights" in points


@pytest.mark.slow
@each_model("decoder")
@few
@given(seed=tiny.seeds, chunks=cuts())
def test_empty_patch_leaves_results_bitwise_equal(name, seed, chunks):
    """An empty patch changes no bit in a full pass, in chunks and in `generate`.

    A patch whose mask is False everywhere compiles another program, which may round differently.
    """
    model, variables, source = setup(name, seed)
    tokens, point = tiny.tokens(seed, BATCH, LENGTH), CHANGED[type(model.config)]
    nowhere = {point: Patch(np.zeros((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), np.float32))}
    plain = jf.inspect(model, variables, tokens, source=source).logits
    in_parts, _ = in_chunks(model, variables, tokens, chunks, source)
    how = {"max_new_tokens": NEW, "source": source, "sampler": GREEDY}
    out = jf.generate(model, variables, tokens[:, :5], **how)
    for patch, same in (({}, np.testing.assert_array_equal), (nowhere, tiny.close)):
        same(jf.inspect(model, variables, tokens, source=source, patch=patch).logits, plain)
        same(in_chunks(model, variables, tokens, chunks, source, patch=patch)[0], in_parts)
        same(jf.generate(model, variables, tokens[:, :5], patch=patch, **how).log_probs, out[2])


@each_model()
@few
@given(seed=tiny.seeds, chunks=cuts(), data=st.data())
def test_patch_at_positions_gives_equal_logits_with_and_without_cache(name, seed, chunks, data):
    """A patch at some positions of a layer gives equal logits in a full pass and in chunks.

    The patched logits differ from the unpatched logits. `generate` returns equal log probabilities.
    """
    model, variables, source = setup(name, seed)
    tokens, point = tiny.tokens(seed, BATCH, LENGTH), CHANGED[type(model.config)]
    count = data.draw(st.integers(1, 3))
    positions = np.random.default_rng(seed).choice(LENGTH - 1, count, replace=False)
    layer = data.draw(st.integers(0, model.config.num_layers - 1))
    where = (np.arange(model.config.num_layers) == layer)[:, None, None, None]
    width = jf.inspect(model, variables, tokens, source=source, capture=(point,))
    width = width.captured[point].shape[-1]
    value = np.float32(np.random.default_rng(seed).normal(size=(1, 1, count, width)))
    patch = {point: Patch(where, value, positions)}
    plain = np.asarray(jf.inspect(model, variables, tokens, source=source).logits)
    whole = jf.inspect(model, variables, tokens, source=source, patch=patch).logits
    assert abs(np.asarray(whole) - plain)[:, positions.min() :].max() > 1e-4
    tiny.close(whole[:, : positions.min()], plain[:, : positions.min()])
    logits, _ = in_chunks(model, variables, tokens, chunks, source, patch=patch)
    tiny.close(logits, whole)

    prompt = tokens[:, : LENGTH - NEW]
    how = {"max_new_tokens": NEW, "source": source, "sampler": GREEDY, "patch": patch}
    out = jf.generate(model, variables, prompt, **how)
    text = np.concatenate([prompt, out.tokens], axis=1)
    logits = jf.inspect(model, variables, text, source=source, patch=patch).logits
    log_probs = jax.nn.log_softmax(logits)[:, -NEW - 1 : -1]
    wanted = np.take_along_axis(np.asarray(log_probs), out.tokens[..., None], axis=-1)[..., 0]
    tiny.close(out.log_probs, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "lstm"])
@few
@given(seed=tiny.seeds, step=st.integers(1, NEW - 1))
def test_patch_at_a_generation_step_equals_patch_at_its_position(name, seed, step):
    """A patch at step t applies to the token that predicts the t-th generated token."""
    model, variables, _ = setup(name, seed)
    prompt, point = tiny.tokens(seed, BATCH, 5), CHANGED[type(model.config)]
    always = np.ones((1, 1, 1, 1), bool)
    value = np.full((1, 1, 1, 1), 0.7, np.float32)
    how = {"max_new_tokens": NEW, "sampler": GREEDY}
    by_step, by_position = (
        jf.generate(model, variables, prompt, patch={point: patch}, **how)
        for patch in (
            Patch(always, value, steps=[step]),
            Patch(always, value, positions=[5 + step - 1]),
        )
    )
    tiny.close(by_step.log_probs, by_position.log_probs)
    plain = jf.generate(model, variables, prompt, **how)
    tiny.close(by_step.log_probs[:, :step], plain.log_probs[:, :step])
    assert (abs(by_step.log_probs - plain.log_probs)[:, step] > 1e-4).all()


@cache
def swept(model):
    """Returns a compiled function that patches one layer and position with a donor's value."""

    def run(variables, tokens, donor, layer, position):
        layers = jnp.arange(model.config.num_layers)
        where = (layers == layer)[:, None, None, None]
        patch = {"block.output": Patch(where, donor, position[None])}
        logits, _ = model.apply(variables, tokens, patch=patch, method="inspect")
        return logits

    grid = jax.vmap(run, in_axes=(None, None, None, 0, 0))
    return jax.jit(run), jax.jit(grid)


@pytest.mark.slow
@few
@given(seed=tiny.seeds)
def test_vmapped_activation_patching_equals_loop(seed):
    """A vmap over all layers and positions gives the same patched logits as a loop."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, LENGTH)
    donor = tiny.embeddings(seed, 1, 1, 1, model.config.embed_dim)
    places = np.indices((model.config.num_layers, LENGTH)).reshape(2, -1)
    one, grid = swept(model)
    found = grid(variables, tokens, donor, *places)
    for place, logits in zip(places.T, found, strict=True):
        tiny.close(logits, one(variables, tokens, donor, *place))


def test_patch_positions_count_within_documents_and_exclude_padding():
    """Positions count within each document, so both documents are patched and padding is not."""
    model = tiny.build(positions="rotary")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 8)
    segment_ids = np.array([[0, 1, 1, 1, 2, 2, 0, 0]])
    where, value = np.ones((1, 1, 1, 1), bool), np.full((1, 1, 1, 1), 7.0, np.float32)
    seen = jf.inspect(
        model,
        variables,
        tokens,
        segment_ids=segment_ids,
        capture=("block.input",),
        patch={"block.input": Patch(where, value, [0])},
    )
    changed = (np.asarray(seen.captured["block.input"])[0, 0] == 7.0).all(axis=-1)
    assert changed.tolist() == [False, True, False, False, True, False, False, False]


WRONG = {
    "no hook point is named 'block.imput'; did you mean block.input": {"capture": ("block.imput",)},
    "no hook point is named 'recurrent.hidden'": {"patch": {"recurrent.hidden": None}},
    "'block.output' is an int; it must be a Patch": {"patch": {"block.output": 3}},
    r"value is \(3,\); it must broadcast to \(1, 4, 8\)": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 3)))}
    },
    r"size 3 on its token axis .*; this size must be 1 or 2, the number of positions": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1, 3, 8)), [0, 1])}
    },
    "'block.output' has steps, which only jf.generate accepts": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1)), None, [0])}
    },
    "positions are 1.5; they must be a list of whole numbers": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1)), 1.5)}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_inspect_rejects_invalid_capture_and_patch(message):
    model = tiny.build()
    with pytest.raises(ValueError, match=message):
        jf.inspect(model, tiny.weights(model, 0), np.zeros((1, 4), int), **WRONG[message])


def test_inspect_with_cache_rejects_source_and_encoder_hook_points():
    """With a cache, a source and hook points of the encoder raise ValueError."""
    model, variables, source = setup("encoder-decoder", 0)
    kept = jf.init_cache(model, variables, BATCH, 8, source)
    tokens = tiny.tokens(0, BATCH, 2)
    with pytest.raises(ValueError, match="source and cache were both given"):
        jf.inspect(model, variables, tokens, kept, source=source)
    with pytest.raises(ValueError, match="capture or patch contains a hook point of the encoder"):
        jf.inspect(model, variables, tokens, kept, capture=("encoder.embedding",))
