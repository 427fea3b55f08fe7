"""Hooks capture and patch the same values in every mode.

The modes are one pass, chunks with a cache, and the compiled loop of `generate`, for every model.
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
from jaxformer.functional.taps import Patch
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.properties.models import MODELS, each_model
from tests.slow import mostly_slow

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


@pytest.mark.parametrize("wrong", [[-1], [0, 6], [10**9]])
def test_a_position_or_step_that_does_not_exist_is_refused(wrong):
    """Such a patch would change nothing. Padding has no position, and documents are counted alone.

    A text of 6 tokens has the positions 0 to 5. `generate` reads 4 tokens and 2 of the 3 new ones.
    """
    model = tiny.build(num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 6)

    def patch(positions):
        return {"block.output": Patch(np.ones((1, 1), bool), np.zeros((1, 1)), positions)}

    def run(positions, tokens=tokens, segments=None):
        jf.inspect(model, variables, tokens, segments=segments, patch=patch(positions))

    def in_cache(positions):
        cache = jf.start(model, variables, 1, 6)
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
        with pytest.raises(ValueError, match=r"positions hold -?\d+; .* in 0 … 5, the tok"):
            call(wrong)
    generated(steps=[2])
    with pytest.raises(ValueError, match=r"steps hold -?\d+; .* in 0 … 2, the gen"):
        generated(steps=wrong)


def own_points(model):
    """Returns the points of the target tokens, without those of a source encoder."""
    return tuple(name for name in model.points if not name.startswith("encoder."))


def in_chunks(model, variables, tokens, chunks, source, **hooks):
    """Reads the tokens chunk by chunk. Returns (logits, captured)."""
    kept, parts, start = jf.start(model, variables, len(tokens), LENGTH, source), [], 0
    for size in chunks:
        some = tokens[:, start : start + size]
        seen = jf.inspect(model, variables, some, kept, **hooks)
        kept, start = seen.cache, start + size
        parts.append(seen)
    captured = {}
    for name in hooks.get("capture", ()):
        found = [part.captured[name] for part in parts]
        if name == "attention.weights":  # the key axis of a chunk has the live slots
            found = [np.asarray(x)[..., :LENGTH] for x in found]
            found = [np.pad(x, [(0, 0)] * 4 + [(0, LENGTH - x.shape[-1])]) for x in found]
        captured[name] = np.concatenate(found, axis=-2)
    return np.concatenate([part.logits for part in parts], axis=1), captured


@each_model("decoder")
@few
@given(seed=tiny.seeds, chunks=cuts())
def test_chunks_capture_what_one_pass_does(name, seed, chunks):
    """Captures every point for any chunks. The logits are those without hooks."""
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
def test_the_compiled_loop_captures_what_one_pass_does(name, seed):
    """`captured` at step t holds the values at the token before the t-th generated one.

    Prompts have different lengths. Keys of attention weights are positions of the text.
    """
    model, variables, source = setup(name, seed)
    prompts, points = [tiny.tokens(seed, 3), tiny.tokens(seed + 1, 7)], model.points
    how = {"max_new_tokens": NEW, "source": source}
    out = jf.generate(model, variables, prompts, sampler=GREEDY, capture=points, **how)
    plain = jf.generate(model, variables, prompts, sampler=GREEDY, **how)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert plain.captured == {}
    for row, prompt in enumerate(prompts):
        text = np.concatenate([prompt, out.tokens[row, :-1]])[None]
        own = None if source is None else source[row : row + 1]
        whole = jf.inspect(model, variables, text, source=own, capture=points).captured
        for point in own_points(model):
            batch_axis = 1 if point in model.layer_points else 0
            found = np.take(out.captured[point], row, axis=batch_axis)
            wanted = np.take(np.asarray(whole[point]), 0, axis=batch_axis)[..., -NEW:, :]
            wanted = np.moveaxis(wanted, -2, batch_axis)
            if point == "attention.weights":
                assert not found[..., text.shape[1] :].any()
                found = found[..., : text.shape[1]]
            tiny.close(found, wanted)


@pytest.mark.slow
def test_the_encoders_points_are_captured_once():
    """`generate` captures them in its pass over the sources, as a full pass does."""
    model, variables, source = setup("encoder-decoder", 0)
    points = tuple(name for name in model.points if name.startswith("encoder."))
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
def test_an_empty_patch_changes_no_bit(name, seed, chunks):
    """Without names the bits are those without hooks, in a pass, in chunks and in `generate`.

    A patch that is false everywhere compiles another program, which may round differently.
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
def test_a_patch_at_positions_is_the_same_in_cached_decoding(name, seed, chunks, data):
    """A patch at some positions of one layer gives the same logits in a pass and in chunks.

    They differ from the unpatched logits. `generate` reports matching log probabilities.
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


@pytest.mark.parametrize("name", mostly_slow(["decoder", "lstm"], "lstm"))
@few
@given(seed=tiny.seeds, step=st.integers(1, NEW - 1))
def test_a_patch_at_steps_is_that_of_their_positions(name, seed, step):
    """Step t patches the token before the t-th generated one, which predicts it."""
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
    """Compiles (variables, tokens, donor, layer, position) → logits patched at that place."""

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
def test_a_sweep_over_layers_and_positions_by_one_vmap_is_the_loop(seed):
    """Activation patching: inserts a donor's value at each layer and each position."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, LENGTH)
    donor = tiny.embeddings(seed, 1, 1, 1, model.config.embed_dim)
    places = np.indices((model.config.num_layers, LENGTH)).reshape(2, -1)
    one, grid = swept(model)
    found = grid(variables, tokens, donor, *places)
    for place, logits in zip(places.T, found, strict=True):
        tiny.close(logits, one(variables, tokens, donor, *place))


def test_padding_and_packed_documents_are_not_patched():
    """Positions count within each document, so both documents are patched and padding is not."""
    model = tiny.build(positions="rotary")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 8)
    segments = np.array([[0, 1, 1, 1, 2, 2, 0, 0]])
    where, value = np.ones((1, 1, 1, 1), bool), np.full((1, 1, 1, 1), 7.0, np.float32)
    seen = jf.inspect(
        model,
        variables,
        tokens,
        segments=segments,
        capture=("block.input",),
        patch={"block.input": Patch(where, value, [0])},
    )
    changed = (np.asarray(seen.captured["block.input"])[0, 0] == 7.0).all(axis=-1)
    assert changed.tolist() == [False, True, False, False, True, False, False, False]


WRONG = {
    "no point is named 'block.imput' \\(nearest: 'block.input'\\)": {"capture": ("block.imput",)},
    "no point is named 'recurrent.hidden'": {"patch": {"recurrent.hidden": None}},
    "'block.output' is a int; it must be a Patch": {"patch": {"block.output": 3}},
    r"value is \(3,\); it must broadcast to \(1, 4, 8\)": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 3)))}
    },
    r"its token axis is 3 long; it must be 1 or, as there are positions, 2": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1, 3, 8)), [0, 1])}
    },
    "'block.output' has steps; only generate has them": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1)), None, [0])}
    },
    "positions are 1.5; they must be a row of whole numbers": {
        "patch": {"block.output": Patch(np.ones((1, 1), bool), np.ones((1, 1)), 1.5)}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_hooks_are_named(message):
    model = tiny.build()
    with pytest.raises(ValueError, match=message):
        jf.inspect(model, tiny.weights(model, 0), np.zeros((1, 4), int), **WRONG[message])


def test_a_cache_rejects_a_source_and_encoder_points():
    """The cache has read its source already."""
    model, variables, source = setup("encoder-decoder", 0)
    kept = jf.start(model, variables, BATCH, 8, source)
    tokens = tiny.tokens(0, BATCH, 2)
    with pytest.raises(ValueError, match="source was given with a cache"):
        jf.inspect(model, variables, tokens, kept, source=source)
    with pytest.raises(ValueError, match="points of the encoder cannot be captured"):
        jf.inspect(model, variables, tokens, kept, capture=("encoder.embedding",))
