"""Tests of `certified_model` with configs whose sizes are None and with prefix models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.verify import certify
from jaxformer.verify.certificate import check_property, chunk_sizes
from jaxformer.verify.certified_model import CertifiedModel, certified_model
from tests.properties import tiny
from tests.properties.models import centred
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
def test_certified_model_resolves_unset_config_sizes(kind):
    """The model, the config and the sources are equal."""
    model = open_model(kind, **OPEN[kind])
    variables = init(model, jax.random.key(0))
    left, complete = (
        certified_model(x, variables) for x in (model, jf.build(model.config.resolved))
    )
    assert left.model == complete.model and left.config == model.config.resolved
    np.testing.assert_equal(
        (left.source, left.padded_source_arguments),
        (complete.source, complete.padded_source_arguments),
    )
    if left.source is not None:
        assert check_property(left, "reads its source").holds


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_rare(OPEN, jf.RecurrentConfig))
def test_model_with_unset_config_sizes_passes_verification(kind):
    model = open_model(kind, **OPEN[kind])
    found = list(certify(model, init(model, jax.random.key(0))))
    assert found and all(entry.holds for entry in found), found


def test_certify_rejects_models_that_are_not_autoregressive():
    with pytest.raises(ValueError, match="not autoregressive"):
        next(certify(centred(), {"params": {}}))


# ---- a prefix, which must be read in one chunk


@given(seed=tiny.seeds, length=st.integers(12, 80), data=st.data())
def test_chunk_sizes_sum_to_length_and_first_chunk_has_at_least_given_size(seed, length, data):
    first = data.draw(st.integers(1, length))
    sizes = chunk_sizes(np.random.default_rng(seed), length, first)
    assert sum(sizes) == length and sizes[0] >= first
    assert set(sizes[1:]) <= {1, 11} and sizes[0] in (1, 11, first)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", mostly_rare((2, 5, 12, 15), 5, 15))
def test_verification_processes_the_whole_prefix_in_one_cached_chunk(prefix):
    model = tiny.build(num_layers=1, prefix=prefix)
    variables = tiny.weights(model, 0)

    @settings(max_examples=4)
    @given(seed=tiny.seeds)
    def holds(seed):
        assert check_property(certified_model(model, variables, seed=seed), "cached = full").holds

    holds()
    assert check_property(certified_model(model, variables), "probabilities sum to 1").holds


@pytest.mark.rare
@pytest.mark.parametrize("prefix", [3, 13])
def test_certify_confirms_all_properties_of_prefix_language_models(prefix):
    model = tiny.build(prefix=prefix, window=7)
    found = list(certify(model, tiny.weights(model, 0)))
    assert found and all(entry.holds for entry in found), found


def test_verification_sequences_are_longer_than_the_prefix():
    """Shorter sequences cannot be read, and sequences of the prefix alone predict nothing."""
    model = jf.build(jf.DecoderConfig(max_length=300, prefix=150))
    assert certified_model(model, {"params": {}}).length == 151
    with pytest.raises(ValueError, match="length is 150; it must be between 151 and 300"):
        certified_model(model, {"params": {}}, length=150)
    for config in (jf.DecoderConfig(max_length=300, prefix=300), jf.DecoderConfig(max_length=9)):
        with pytest.raises(
            ValueError, match=rf"max_length is {config.max_length}, but .* at least"
        ):
            certified_model(jf.build(config), {"params": {}})


@pytest.mark.parametrize("prefix", [0, 8])
def test_model_verification_does_not_check_the_loss_floor_on_targets_within_the_prefix(prefix):
    """Outputs within the prefix see their next token; the loss floor excludes them."""

    class Told:
        config, minimum_prefill = tiny.build(prefix=prefix).config, max(1, prefix)

        def apply(self, variables, tokens):
            answers = 9.0 * jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), self.config.vocab_size)
            guesses = jax.random.normal(jax.random.key(0), answers.shape)
            seen = jnp.arange(tokens.shape[1]) < (prefix - 1 if prefix else 16)
            return jnp.where(seen[:, None], answers, guesses)

    assert check_property(CertifiedModel(Told(), {"params": {}}, 16), "loss floor").holds == (
        prefix > 0
    )
