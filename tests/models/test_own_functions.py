"""Masks, activations and positions that are given to a model as arrays or functions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import Causal, Prefix, Window, sinusoidal_positions
from jaxformer.models.parameters import init
from jaxformer.verify.certificate import check_property
from jaxformer.verify.certified_model import certified_model
from tests.errors import error_of
from tests.properties import tiny
from tests.properties.chunks import chunked, cuts
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = tiny.SIZES["max_length"]
KINDS = (jf.DecoderConfig, jf.EncoderConfig, jf.EncoderDecoderConfig)


def table_of(mask):
    query = jf.functional.TokenInfo(LENGTH)
    return np.asarray(mask(query, query))


def bend(x):
    return x + 0.5 * jnp.sin(x)


def wave(positions, dim):
    return jnp.cos(positions[:, None] * (1 + jnp.arange(dim)) / dim)


def with_parts(model, **parts):
    return jf.build(model.config, model.execution, **parts)


def logits(model, seed, segment_ids=None):
    variables = tiny.weights(model, seed)
    tokens = tiny.tokens(seed, 2, tiny.LENGTH)
    sources = tiny.read(model, tiny.sources(model, 0, 2))
    return tiny.apply(model)(variables, tokens, segment_ids, **sources)


MASKS = {
    "causal": Causal(),
    "window": Causal() & Window(3),
    "prefix": Prefix(4),
}
RULES = {
    "causal": lambda query, key: key <= query,
    "window": lambda query, key: (key <= query) & (key > query - 3),
    "prefix": lambda query, key: (key <= query) | (key < 4),
}


@pytest.mark.parametrize("name", mostly_slow(MASKS, slow=["causal"]))
@settings(max_examples=3)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_model_with_mask_given_as_array_or_function_equals_model_with_mask_object(
    name, seed, segment_ids, chunks
):
    """The logits agree in one pass, in packed documents, and in cached chunks."""
    plain = tiny.build(mask=MASKS[name])
    table = table_of(MASKS[name])
    expected = logits(plain, seed, segment_ids)
    variables, tokens = tiny.weights(plain, seed), tiny.tokens(seed, 2, tiny.LENGTH)
    for mask in (table, jnp.asarray(table, int), table.astype(float), RULES[name]):
        model = with_parts(plain, mask=mask)
        tiny.close(logits(model, seed, segment_ids), expected, where=segment_ids != 0)
        if name != "prefix":  # its first tokens must be read in one call
            found, _ = chunked(model, variables, tokens, chunks, segment_ids)
            tiny.close(found, expected, where=segment_ids != 0)
    assert with_parts(plain, mask=table).minimum_prefill == plain.minimum_prefill


@settings(max_examples=4)
@given(seed=tiny.seeds)
def test_dependencies_of_a_model_equal_its_randomly_drawn_mask_array(seed):
    """A random causal table with a full diagonal, in one layer."""
    rng = np.random.default_rng(seed)
    table = np.tril(rng.random((LENGTH, LENGTH)) < 0.5) | np.eye(LENGTH, dtype=bool)
    model = with_parts(tiny.build(num_layers=1), mask=table)
    variables, x = tiny.weights(model, seed), tiny.embeddings(seed, 1, tiny.LENGTH, 8)
    slopes = jax.jit(jax.jacobian(lambda x: model.apply(variables, x)[0].sum(axis=-1)))(x)[:, 0]
    edges = abs(np.asarray(slopes)).max(axis=-1) > 1e-9
    np.testing.assert_array_equal(edges, table[: tiny.LENGTH, : tiny.LENGTH])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "cached = full"])
def test_model_with_a_mask_array_passes_verification(name):
    model = with_parts(tiny.build(), mask=table_of(Causal() & Window(3)))
    assert check_property(certified_model(model, tiny.weights(model, 0), length=12), name).holds


@pytest.mark.parametrize("kind", mostly_slow(KINDS, slow=[jf.DecoderConfig]))
@settings(max_examples=5)
@given(seed=tiny.seeds, name=st.sampled_from(["relu", "tanh", "silu"]))
def test_activation_given_as_function_equals_activation_given_by_name(kind, seed, name):
    named = tiny.build(kind, activation=name)
    function = {"relu": jax.nn.relu, "tanh": jnp.tanh, "silu": jax.nn.silu}[name]
    other = tiny.build(kind, activation="gelu")
    tiny.close(logits(with_parts(other, activation=function), seed), logits(named, seed))


def test_convolutional_model_accepts_an_activation_given_as_function():
    named = tiny.build(jf.ConvolutionalConfig, activation="relu")
    other = tiny.build(jf.ConvolutionalConfig, activation="gelu")
    tiny.close(logits(with_parts(other, activation=jax.nn.relu), 0), logits(named, 0))


@pytest.mark.parametrize("kind", mostly_slow(KINDS, slow=[jf.DecoderConfig]))
@settings(max_examples=5)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2))
def test_positions_given_as_array_or_function_equal_positions_given_by_name(
    kind, seed, segment_ids
):
    """Positions begin anew in each packed document."""
    named = tiny.build(kind, positions="sinusoidal")
    size = max(LENGTH, named.config.longest_source)
    table = sinusoidal_positions(jnp.arange(size), named.config.embed_dim)
    none = tiny.build(kind, positions="none")
    expected = logits(named, seed, segment_ids)
    for positions in (sinusoidal_positions, table, np.asarray(table)):
        found = logits(with_parts(none, positions=positions), seed, segment_ids)
        tiny.close(found, expected, where=segment_ids != 0)


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_positions_of_cached_chunks_equal_those_of_one_pass(seed, segment_ids, chunks):
    model = with_parts(tiny.build(positions="none"), positions=wave, activation=bend)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, tiny.LENGTH)
    found, _ = chunked(model, variables, tokens, chunks, segment_ids)
    tiny.close(found, logits(model, seed, segment_ids), where=segment_ids != 0)


@pytest.mark.slow
def test_positions_given_as_array_limit_the_text_length_but_positions_given_as_function_do_not():
    """A model with a window decodes past max_length, if its positions are a function."""
    plain = tiny.build(positions="none", window=3, max_length=16)
    variables, tokens = tiny.weights(plain, 0), tiny.tokens(0, 1, 12)
    vectors = tiny.embeddings(1, 16, 8)

    def extended(positions):
        model = with_parts(plain, positions=positions)
        cache = jf.init_cache(model, variables, 1, 16, ring=True)
        _, cache = jf.extend(model, variables, tokens, cache)
        return jf.extend(model, variables, tokens, cache)[0]

    assert np.isfinite(extended(wave)).all()
    assert "max_length is 16" in error_of(extended, vectors)


def test_user_defined_positions_replace_the_learned_position_embeddings():
    model = with_parts(tiny.build(positions="learned"), positions=wave)
    key = jax.random.key(0)
    weights = jax.eval_shape(lambda: init(model, key))["params"]
    assert "positions" not in weights["embedding"]
    assert jax.eval_shape(lambda: model.init(key, jnp.ones((1, 3), int))) == {"params": weights}


def test_model_with_user_defined_arrays_and_functions_is_saved_and_loaded(tmp_path):
    table, vectors = table_of(Causal() & Window(3)), tiny.embeddings(0, LENGTH, 8)
    by_array = with_parts(tiny.build(positions="none"), mask=table, positions=vectors)
    jf.save(tmp_path / "arrays", by_array, tiny.weights(by_array, 0))
    loaded = jf.load(tmp_path / "arrays")
    assert loaded.model == by_array
    tiny.close(logits(loaded.model, 1), logits(by_array, 1), 0.0)
    by_name = with_parts(tiny.build(positions="none"), activation=bend, positions=wave)
    jf.save(tmp_path / "names", by_name, tiny.weights(by_name, 0))
    assert jf.load(tmp_path / "names", layers=[bend, wave]).model == by_name
    assert "is the function tests.models.test_own_functions:bend" in error_of(
        lambda: jf.load(tmp_path / "names", layers=[wave])
    )
    unnamed = with_parts(by_name, activation=lambda x: x)
    assert "cannot be stored by name" in error_of(
        jf.save, tmp_path / "no", unnamed, tiny.weights(unnamed, 0)
    )
    assert "activation is <function bend" in error_of(
        jf.export, tmp_path / "no", by_name, tiny.weights(by_name, 0)
    )


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"mask": np.ones((4, 5))}, "mask has shape (4, 5); the mask of a model must be"),
        ({"mask": np.full((16, 16), 0.5)}, "True and False, or 1 and 0"),
        ({"mask": np.tri(6)}, "mask has shape (6, 6), but max_length is 16"),
        ({"mask": "causal"}, "mask is a str"),
        ({"activation": "tanh"}, "activation is 'tanh'; pass a function, or set activation"),
        ({"positions": np.ones((16, 7))}, "positions has shape (16, 7); it must be"),
        ({"positions": np.ones((9, 8))}, "positions has shape (9, 8); it must be"),
        ({"positions": np.ones(16)}, "positions has shape (16,); it must be"),
        ({"positions": "learned"}, "positions is a str; it must be an array"),
        ({"positions": lambda positions, dim: positions}, "positions returns an array of shape"),
    ],
)
def test_invalid_user_defined_mask_or_activation_or_positions_are_rejected(parts, message):
    def run():
        model = with_parts(tiny.build(positions="none"), **parts)
        model.apply(tiny.weights(tiny.build(positions="none"), 0), tiny.tokens(0, 1, 5))

    assert message in error_of(run)


@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative"])
def test_user_defined_positions_are_rejected_if_attention_encodes_positions(positions):
    model = with_parts(tiny.build(positions=positions), positions=wave)
    assert "set positions='none'" in error_of(lambda: model.architecture)


@pytest.mark.parametrize("part", ["mask", "activation", "positions"])
def test_recurrent_model_rejects_user_defined_mask_and_activation_and_positions(part):
    parts = {"mask": Causal(), "activation": bend, "positions": wave}
    model = with_parts(tiny.build(jf.RecurrentConfig), **{part: parts[part]})
    assert f"{part} is not accepted, because RecurrentConfig" in error_of(
        lambda: model.architecture
    )


def test_user_defined_activation_is_rejected_together_with_user_defined_layers():
    model = tiny.build()
    layers = model.architecture.stack.layers
    both = replace(with_parts(model, activation=bend), layers=layers)
    assert "activation is <function bend" in error_of(lambda: both.architecture)
