"""Tests of `subject_of` with configs whose sizes are None and with prefix models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.verify import certify
from jaxformer.verify.certificate import chunk_sizes, examine
from jaxformer.verify.subject import Subject, subject_of
from tests.properties import tiny
from tests.slow import mostly_rare, mostly_slow

# Only the required fields of each kind's config: every optional size is None.
OPEN = {
    jf.DecoderConfig: {"num_heads": 2},
    jf.EncoderDecoderConfig: {"num_heads": 2},
    jf.RecurrentConfig: {},
    jf.RecurrentEncoderDecoderConfig: {},
    jf.ConvolutionalConfig: {},
}


def open_model(kind, **options):
    sizes = {"vocab_size": 13, "max_length": 16, "num_layers": 1, "embed_dim": 8}
    return jf.build(kind(**sizes, **options))


@pytest.mark.parametrize("kind", mostly_slow(OPEN, jf.DecoderConfig))
def test_sizes_left_open_are_those_of_the_complete_config(kind):
    """The model, the config and the sources are equal."""
    model = open_model(kind, **OPEN[kind])
    variables = init(model, jax.random.key(0))
    left, complete = (subject_of(x, variables) for x in (model, jf.build(model.config.resolved)))
    assert left.model == complete.model and left.config == model.config.resolved
    np.testing.assert_equal(
        (left.source, left.padded_read), (complete.source, complete.padded_read)
    )
    if left.source is not None:
        assert examine(left, "reads its source").holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_rare(OPEN, jf.RecurrentConfig))
def test_every_property_accepts_open_sizes(kind):
    model = open_model(kind, **OPEN[kind])
    found = list(certify(model, init(model, jax.random.key(0))))
    assert found and all(entry.holds for entry in found), found


def test_models_that_are_not_autoregressive_are_refused_first():
    with pytest.raises(ValueError, match="not autoregressive"):
        next(certify(jf.build(jf.ConvolutionalConfig(causal=False)), {"params": {}}))


# ---- a prefix, which must be read in one chunk


@given(seed=tiny.seeds, length=st.integers(12, 80), data=st.data())
def test_chunks_are_a_text_and_the_first_is_large_enough(seed, length, data):
    first = data.draw(st.integers(1, length))
    sizes = chunk_sizes(np.random.default_rng(seed), length, first)
    assert sum(sizes) == length and sizes[0] >= first
    assert set(sizes[1:]) <= {1, 11} and sizes[0] in (1, 11, first)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", mostly_rare((2, 5, 12, 15), 5, 15))
def test_a_prefix_is_read_in_one_chunk(prefix):
    model = tiny.build(num_layers=1, prefix=prefix)
    variables = tiny.weights(model, 0)

    @settings(max_examples=4)
    @given(seed=tiny.seeds)
    def holds(seed):
        assert examine(subject_of(model, variables, seed=seed), "cached = full").holds

    holds()
    assert examine(subject_of(model, variables), "probabilities sum to 1").holds


@pytest.mark.rare
@pytest.mark.parametrize("prefix", [3, 13])
def test_a_prefix_model_has_its_certificate(prefix):
    model = tiny.build(prefix=prefix, window=7)
    found = list(certify(model, tiny.weights(model, 0)))
    assert found and all(entry.holds for entry in found), found


def test_rows_are_longer_than_the_prefix():
    """Shorter rows cannot be read, and rows of the prefix alone predict nothing."""
    model = jf.build(jf.DecoderConfig(max_length=300, prefix=150))
    assert subject_of(model, {"params": {}}).length == 151
    with pytest.raises(ValueError, match="length is 150; it must be in 151 … 300"):
        subject_of(model, {"params": {}}, length=150)
    for config in (jf.DecoderConfig(max_length=300, prefix=300), jf.DecoderConfig(max_length=9)):
        with pytest.raises(ValueError, match=rf"max_length is {config.max_length}; .* at least"):
            subject_of(jf.build(config), {"params": {}})


@pytest.mark.parametrize("prefix", [0, 8])
def test_nothing_is_lost_by_seeing_within_the_prefix(prefix):
    """Outputs within the prefix see their next token; the loss floor excludes them."""

    class Told:
        config, minimum_prefill = tiny.build(prefix=prefix).config, max(1, prefix)

        def apply(self, variables, tokens):
            answers = 9.0 * jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), self.config.vocab_size)
            guesses = jax.random.normal(jax.random.key(0), answers.shape)
            seen = jnp.arange(tokens.shape[1]) < (prefix - 1 if prefix else 16)
            return jnp.where(seen[:, None], answers, guesses)

    assert examine(Subject(Told(), {"params": {}}, 16), "loss floor").holds == (prefix > 0)
