"""The gated delta rule against loops in float64, in steps, in chunks and in a model."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import GatedDelta, Residual
from jaxformer.functional.attention.masks import Window
from jaxformer.functional.layers.gated_delta import (
    DeltaInputs,
    chunked_delta_rule,
    gated_delta_rule,
    invert_unit_lower,
)
from jaxformer.functional.layers.norms import LayerNorm
from jaxformer.verify import rules
from tests.models import own_stacks
from tests.properties import tiny
from tests.properties.chunks import chunked, cuts
from tests.properties.models import MODELS
from tests.properties.witness import exactly, jacobian
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
HEADS, KEYS, VALUES, CHUNK = 2, 4, 3, 8
# One token; one chunk, a token less and a token more; three chunks and a token more.
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1]
FORMS = {"steps": gated_delta_rule, "chunks": lambda *x: chunked_delta_rule(*x, chunk_size=CHUNK)}


def reference(inputs, memory):
    """The formula of the module, token by token, in NumPy."""
    query, key, value, log_decay, rate, begins = (np.asarray(x, np.float64) for x in inputs)
    memory, output = np.array(memory, np.float64), np.zeros(value.shape)
    for b, h, t in np.ndindex(log_decay.shape):
        state = memory[b, h] * (0 if begins[b, t] else np.exp(log_decay[b, h, t]))
        error = value[b, h, t] - key[b, h, t] @ state
        memory[b, h] = state + np.outer(key[b, h, t], rate[b, h, t] * error)
        output[b, h, t] = query[b, h, t] @ memory[b, h]
    return output, memory


def draw(seed, length, begins, strength=1.0):
    """Returns inputs with keys of length 1, and a memory. Some tokens are padding."""
    rng, batch = np.random.default_rng(seed), len(begins)
    query, key, value = (
        rng.normal(size=(batch, HEADS, length, size)) for size in (KEYS, KEYS, VALUES)
    )
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    is_token = rng.random((batch, 1, length)) < 0.8
    log_decay = -strength * rng.exponential(size=(batch, HEADS, length)) * is_token
    rate = rng.random((batch, HEADS, length)) * is_token
    inputs = DeltaInputs(query, key, value, log_decay, rate, begins & is_token[:, 0])
    memory = rng.normal(size=(batch, HEADS, KEYS, VALUES))
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (inputs[:-1], memory))
    return DeltaInputs(*arrays[0], jnp.asarray(inputs.begins)), arrays[1]


@cache
def compiled(form):
    return jax.jit(FORMS[form])


@pytest.mark.parametrize("length", mostly_slow(LENGTHS, CHUNK, 3 * CHUNK + 1))
@pytest.mark.parametrize("form", FORMS)
@given(seed=tiny.seeds, every=st.sampled_from([1, 3, CHUNK, CHUNK + 1, 99]))
@example(seed=0, every=CHUNK)  # documents that begin with the last token of a chunk
@example(seed=0, every=99)  # no document begins, so the memory is never reset
def test_steps_and_chunks_of_delta_rule_equal_formula(form, length, seed, every):
    begins = np.repeat((np.arange(length) % every == every - 1)[None], 2, axis=0)
    inputs, memory = draw(seed, length, begins)
    for found, wanted in zip(
        compiled(form)(inputs, memory), reference(inputs, memory), strict=True
    ):
        tiny.close(found, wanted, 1e-5)


@pytest.mark.parametrize("strength", [0.0, 1e-4, 30.0, 1e4])
def test_chunked_delta_rule_equals_the_reference_for_weak_and_strong_decays(strength):
    """No decay, a decay that rounds to none over a step, and decays to 0 in one step."""
    inputs, memory = draw(1, 3 * CHUNK, np.zeros((2, 3 * CHUNK), bool), strength)
    for found, wanted in zip(
        compiled("chunks")(inputs, memory), reference(inputs, memory), strict=True
    ):
        assert np.isfinite(found).all()
        tiny.close(found, wanted, 1e-5)


@pytest.mark.slow
def test_gradients_of_chunked_delta_rule_equal_those_of_single_steps():
    length = 2 * CHUNK + 3
    inputs, memory = draw(2, length, np.arange(length)[None] == CHUNK)

    def total(form, parts, memory):
        output, after = FORMS[form](DeltaInputs(*parts, inputs.begins), memory)
        return jnp.square(output).sum() + jnp.sin(after).sum()

    steps, chunks = (
        jax.jit(jax.grad(lambda *x, form=form: total(form, *x), argnums=(0, 1)))(
            tuple(inputs[:-1]), memory
        )
        for form in FORMS
    )
    tiny.all_close(chunks, steps, 1e-4)


@pytest.mark.slow
@given(seed=tiny.seeds, size=st.sampled_from([1, 2, 8]))
def test_inverse_of_a_unit_lower_triangular_matrix_equals_numpy(seed, size):
    a = np.tril(np.random.default_rng(seed).normal(size=(3, size, size)), -1)
    inverse = invert_unit_lower(jnp.asarray(a, jnp.float32))
    tiny.close(inverse, np.linalg.inv(np.eye(size) + a), 1e-3)


# ---- in a model

CONFIG = tiny.build(num_layers=2, positions="rotary").config


@cache
def model():
    """Returns a decoder with the delta rule, with grouped heads, before its attention."""
    attention = jf.Decoder(CONFIG).architecture.stack.layers[0]
    delta = GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, kernel_size=3)
    layers = ((Residual(delta, LayerNorm()), *attention[1:]), attention)
    return replace(jf.Decoder(CONFIG), layers=layers)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_model_with_delta_rule_in_cached_chunks_equals_one_pass(seed, segment_ids, chunks):
    own_stacks.chunks_equal_one_pass(model(), seed, segment_ids, chunks)


@pytest.mark.slow
@given(seed=tiny.seeds, places=st.sets(st.integers(0, tiny.LENGTH - 1), max_size=5))
def test_padding_does_not_change_the_logits(seed, places):
    """A text has the same logits with padding at any places, whatever stands there."""
    there = np.array([i not in places for i in range(tiny.LENGTH)])
    variables, tokens = tiny.weights(model(), seed), tiny.tokens(seed, 1, tiny.LENGTH)
    padded = tiny.apply(model())(variables, tokens, there.astype(np.int32)[None])
    text = np.concatenate([tokens[:, there], tokens[:, ~there]], axis=1)  # for one program
    tiny.close(padded[:, there], tiny.apply(model())(variables, text)[:, : there.sum()])


@pytest.mark.slow
@pytest.mark.parametrize("first", [63, 64, 65, 128])
def test_long_text_in_cached_chunks_of_any_length_equals_one_pass(first):
    """Chunks of 64 tokens are computed at once. One document ends where one of them ends."""
    config = replace(CONFIG, max_length=160)
    long = replace(model(), config=config)
    variables, tokens = tiny.weights(long, 0), tiny.tokens(0, 2, 150)
    segment_ids = np.ones((2, 150), int)
    segment_ids[1, 64:] = 2
    segment_ids[1, 70:75] = 0
    whole = long.apply(variables, tokens, segment_ids)
    cache = jf.init_cache(long, variables, 2, 160)
    parts = []
    for span in (slice(first), slice(first, first + 1), slice(first + 1, 150)):
        logits, cache = jf.extend(long, variables, tokens[:, span], cache, segment_ids[:, span])
        parts.append(logits)
    tiny.close(np.concatenate(parts, axis=1), whole, where=segment_ids != 0)


@pytest.mark.slow
def test_delta_rule_model_depends_on_the_inputs_that_its_mask_allows():
    own_stacks.dependencies_are_the_rules(model())


@pytest.mark.slow
def test_saved_model_with_delta_rule_loads_with_equal_logits(tmp_path):
    own_stacks.a_saved_model_is_equal(tmp_path / "delta", model())


def test_delta_rule_rejects_indivisible_head_counts():
    with pytest.raises(ValueError, match="num_key_heads is 2, but must divide num_val"):
        GatedDelta(num_key_heads=2, num_value_heads=3, key_dim=4, value_dim=4)


# ---- in a config


def hybrid(**options):
    return tiny.build(**MODELS["gated delta"], **options)


@pytest.mark.slow
@pytest.mark.parametrize("length", [63, 64, 65, 128, 129])
def test_model_with_delta_rule_in_steps_and_chunks_equals_one_pass(length):
    """For texts whose length, cuts and documents end beside the 64 tokens of a chunk."""
    model = hybrid(max_length=160)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 4, length)
    segment_ids = np.ones((4, length), int)
    for index, end in enumerate((63, 64, 65), 1):
        segment_ids[index, end:] = 2
    whole = tiny.apply(model)(variables, tokens, segment_ids)
    for sizes in ([1] * length, [64] * (length // 64) + [1] * (length % 64), [63, length - 63]):
        cache = jf.init_cache(model, variables, 4, 160)
        parts = [x for x in sizes if x]
        logits, _ = chunked(model, variables, tokens, parts, segment_ids, cache)
        tiny.close(logits, whole, 2e-5)


@pytest.mark.slow
def test_user_defined_mask_changes_only_attention_layers():
    model = hybrid(mask=Window(2), num_layers=3)
    x, segment_ids = tiny.embeddings(0, 1, tiny.LENGTH, 8), np.ones((1, tiny.LENGTH), int)
    found = jacobian(model)(tiny.weights(model, 1), x, jnp.asarray(segment_ids), None)
    exactly(found, rules.model_rule(model.config, segment_ids, mask=Window(2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "types",
    [
        pytest.param("gated_delta", marks=pytest.mark.slow),
        ("gated_delta", "gated_delta", "attention"),
    ],
)
def test_generation_with_delta_rule_equals_uncached_passes(types):
    """Prompts of different lengths. Without attention, a cache has no slots and no limit."""
    model = tiny.build(**MODELS["gated delta"] | {"layer_types": types, "num_layers": 3})
    variables, prompts = tiny.weights(model, 2), [[3, 1, 4, 1, 5], [9]]
    greedy = jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, prompts, max_new_tokens=6, sampler=greedy)
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        logits = tiny.apply(model)(variables, np.array([[*prompt, *tokens]]))
        np.testing.assert_array_equal(logits[0, len(prompt) - 1 : -1].argmax(axis=-1), tokens)
    assert (jf.init_cache(model, variables, 2, 8).capacity is None) == (types == "gated_delta")


def test_head_sizes_of_delta_rule_default_to_attention_sizes():
    config = jf.DecoderConfig(embed_dim=24, num_heads=6, layer_types=("gated_delta", "attention"))
    assert config.resolved.delta_sizes == (6, 6, 4, 4) == config.delta_sizes
    assert replace(config, delta_value_heads=4).resolved.delta_key_heads == 4
    assert replace(config, layer_types="attention").resolved.delta_key_heads is None
    assert jf.Decoder(config).architecture.stack.layers[0][0].sublayer == GatedDelta(
        6, 6, 4, 4, config.convolution_kernel_size, config.norm_epsilon
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"delta_key_heads": 5, "delta_value_heads": 12},
            r"delta_key_heads is 5; it must divide delta_value_heads \(12\)",
        ),
        ({"delta_value_heads": 4, "delta_key_heads": 8}, "delta_key_heads is 8; it must divide"),
        ({"delta_key_dim": 0}, "delta_key_dim is 0; it must be a whole number of at least 1"),
        ({"delta_value_dim": 2.5}, "delta_value_dim is 2.5; it must be a whole number"),
        ({"layer_types": ("gated_delta", "delta")}, "layer_types is .*'delta'.*; it must be one"),
    ],
)
def test_config_rejects_invalid_delta_rule_fields(options, message):
    with pytest.raises(ValueError, match=message):
        jf.DecoderConfig(**options)
