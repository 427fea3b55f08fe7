"""The gated short convolution against loops in float64, in one pass and in chunks of any size."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.short_convolution import ShortConvolution
from jaxformer.functional.layers.sublayer import At, Initial, Start
from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.verify import assert_dependencies, rules
from tests.properties import oracle, tiny
from tests.properties.chunks import chunked
from tests.slow import mostly_slow

DIM, LENGTH = 6, tiny.LENGTH
LAYERS = [(1, False), (2, True), (3, False), (4, True)]
SEGMENTS = tiny.segment_batches(2)


@cache
def layer_of(kernel_size, use_bias):
    return ShortConvolution(kernel_size, use_bias)


@cache
def compiled(layer):
    """Compiles (weights, x, segment_ids, cursor, state) → (y, state, cursor)."""

    @jax.jit
    def run(weights, x, segment_ids, cursor, state):
        documents, positions, cursor = document_positions(segment_ids, cursor)
        order = TokenOrder.of(TokenInfo(x.shape[1], positions, documents))
        y, state, _ = layer(weights, x, At(order, state))
        return y, state, cursor

    return run


def draw_weights(layer, seed):
    shapes = jax.eval_shape(lambda key: layer.init(key, DIM, Initial(1)), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)


def in_float64(layer, weights, x, segment_ids):
    exact, outputs = oracle.float64(weights), []
    for sequence, ids in zip(np.float64(x), segment_ids, strict=True):
        seen = rules.visible(ids, layer.kernel_size)
        outputs.append(oracle.short_convolution(exact, sequence, seen, rules.read(ids)[1]))
    return np.stack(outputs)


def in_chunks(layer, weights, x, segment_ids, sizes):
    """Reads x chunk by chunk. Returns the outputs of all tokens."""
    state, cursor = (
        layer.init_state({}, Start(len(x), DIM, "float32")),
        DocumentCursor.begin(len(x)),
    )
    outputs, start = [], 0
    for size in sizes:
        span = slice(start, start + size)
        y, state, cursor = compiled(layer)(weights, x[:, span], segment_ids[:, span], cursor, state)
        outputs.append(y)
        start += size
    assert start == x.shape[1]
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize(
    "form",
    mostly_slow([(x,) for x in LAYERS], (LAYERS[2],), slow=[(x,) for x in LAYERS]),
)
@given(seed=tiny.seeds, segment_ids=SEGMENTS)
def test_gated_short_convolution_equals_formula(form, seed, segment_ids):
    """Padding takes no position, and a document reads no inputs of the document before it."""
    layer = layer_of(*form)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, LENGTH, DIM)
    y, _, _ = compiled(layer)(weights, x, jnp.asarray(segment_ids), DocumentCursor.begin(2), None)
    tiny.close(y, in_float64(layer, weights, x, segment_ids), where=segment_ids != 0)
    without = layer(weights, x, At(TokenOrder.of(TokenInfo(LENGTH)))).x
    tiny.close(without, in_float64(layer, weights, x, np.ones((2, LENGTH), int)))


@pytest.mark.slow
@pytest.mark.parametrize("form", LAYERS)
@given(seed=tiny.seeds, segment_ids=SEGMENTS, size=st.sampled_from([1, 2, 3, 4, 5]))
def test_convolution_in_chunks_of_any_size_equals_one_pass(form, seed, segment_ids, size):
    """Chunks of one token, of the kernel's size, and of one token more or less."""
    layer = layer_of(*form)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 2, LENGTH, DIM)
    sizes = [size] * (LENGTH // size) + [1] * (LENGTH % size)
    found = in_chunks(layer, weights, x, jnp.asarray(segment_ids), sizes)
    tiny.close(found, in_float64(layer, weights, x, segment_ids), where=segment_ids != 0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_convolution_is_correct_if_documents_end_at_chunk_ends(size):
    """For chunks of the kernel's size, and of one token more or less, with padding at each end."""
    layer = layer_of(3, False)
    weights, x = draw_weights(layer, 0), tiny.embeddings(0, 4, LENGTH, DIM)
    segment_ids = np.repeat([np.arange(LENGTH) // size + 1], 4, axis=0)
    segment_ids[1, ::size] = 0  # padding before each document
    segment_ids[2, size - 1 :: size] = 0  # and behind it
    segment_ids[3] = 1
    found = in_chunks(layer, weights, x, jnp.asarray(segment_ids), [size] * (LENGTH // size))
    tiny.close(found, in_float64(layer, weights, x, segment_ids), where=segment_ids != 0)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=SEGMENTS)
def test_padding_does_not_change_convolution_outputs_and_state(seed, segment_ids):
    """Neither the values at padding nor the state: the state is that of the tokens alone."""
    layer = layer_of(4, True)
    weights, x = draw_weights(layer, seed), tiny.embeddings(seed, 1, LENGTH, DIM)
    ids, state = segment_ids[:1], layer.init_state({}, Start(1, DIM, "float32"))
    run = partial(compiled(layer), weights)
    _, found, _ = run(x, jnp.asarray(ids), DocumentCursor.begin(1), state)
    other = jnp.where((ids != 0)[..., None], x, 100.0)
    _, same, _ = run(other, jnp.asarray(ids), DocumentCursor.begin(1), state)
    tiny.close(same, found, 0.0)
    alone, order = state, np.flatnonzero(ids[0])
    cursor = DocumentCursor.begin(1)
    for t in order:
        _, alone, cursor = run(x[:, t : t + 1], jnp.asarray(ids[:, t : t + 1]), cursor, alone)
    tiny.close(found, alone)


# ---- in a model


@cache
def model_of(**options):
    return tiny.build(positions="rotary", num_layers=3, **options)


@pytest.mark.slow
def test_stacked_short_convolutions_depend_only_on_their_receptive_field():
    model = model_of(layer_types="short_convolution")
    variables, x = tiny.weights(model, 0), tiny.embeddings(0, 10, 8)

    def hidden(variables, x):
        return model.apply(variables, x[None], method="hidden_states")[0]

    seen = rules.composed([rules.visible(10, 3)] * 3, 10)
    assert not seen[9, 2] and seen[9, 3]
    assert_dependencies(hidden, x, seen, weights=variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    "types", ["short_convolution", ("short_convolution", "short_convolution", "attention")]
)
def test_generation_with_short_convolution_equals_uncached_passes(types):
    """Prompts of different lengths. Without attention, a cache has no slots and no limit."""
    model = model_of(layer_types=types)
    variables, prompts = tiny.weights(model, 2), [[3, 1, 4, 1, 5], [9]]
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, prompts, max_new_tokens=6, sampler=greedy)
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        text = np.array([[*prompt, *tokens]])
        logits = tiny.apply(model)(variables, text)
        np.testing.assert_array_equal(logits[0, len(prompt) - 1 : -1].argmax(axis=-1), tokens)
    cache = jf.init_cache(model, variables, 2, 8)
    assert (cache.capacity is None) == (types == "short_convolution")


@pytest.mark.slow
def test_captured_values_contain_only_layers_that_have_the_hook_point():
    model = model_of(layer_types=("short_convolution", "attention"))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, LENGTH)
    points = ("short_convolution.convolved", "attention.heads", "block.output")
    seen = jf.inspect(model, variables, tokens, capture=points).captured
    assert [len(seen[name]) for name in points] == [2, 1, 3]
    gated = jf.inspect(model, variables, tokens, capture=("short_convolution.gated",)).captured
    of_layers = np.float64(gated["short_convolution.gated"])[:, 0]
    weights = oracle.float64(variables["params"]["blocks"]["0"]["short_convolution"])
    for place in range(2):
        convolution = {"filter": weights["convolution"]["filter"][place]}
        wanted = oracle.convolution(
            convolution, of_layers[place], rules.visible(LENGTH, 3), np.arange(LENGTH)
        )
        tiny.close(seen["short_convolution.convolved"][place, 0], wanted)


@pytest.mark.slow
def test_saved_model_with_short_convolution_loads_with_equal_logits(tmp_path):
    model = model_of(layer_types=("short_convolution", "attention"), convolution_bias=True)
    variables, tokens = tiny.weights(model, 3), tiny.tokens(3, 2, LENGTH)
    jf.save(tmp_path / "hybrid", model, variables)
    loaded = jf.load(tmp_path / "hybrid")
    assert loaded.model.config == model.config
    tiny.close(loaded.model.apply(loaded.variables, tokens), model.apply(variables, tokens), 0.0)


@pytest.mark.slow
def test_scanned_layers_equal_unrolled_layers():
    model = model_of(layer_types=("short_convolution", "attention"))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, LENGTH)
    scanned = model.clone(execution=jf.Execution(layers="scan"))
    wanted = tiny.apply(model)(variables, tokens)
    tiny.close(tiny.apply(scanned)(variables, tokens), wanted)
    tiny.close(chunked(scanned, variables, tokens, [8, 1, 3])[0], wanted)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_types": ()}, "layer_types is empty; a pattern must have at least one entry"),
        ({"layer_types": "conv"}, "layer_types is 'conv'; it must be one of .*short_convolution"),
        ({"convolution_kernel_size": 0}, "convolution_kernel_size is 0; it must be a whole number"),
    ],
)
def test_config_rejects_invalid_short_convolution_fields(options, message):
    with pytest.raises(ValueError, match=message):
        jf.DecoderConfig(**options)
