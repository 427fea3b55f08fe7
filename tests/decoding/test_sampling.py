"""The sampler keeps exactly the tokens of its definition and rejects invalid settings."""

from dataclasses import astuple
from decimal import Decimal
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding.sampling import sample_tokens, truncate
from tests.properties import oracle

SIZE = 12
LARGEST = float(np.finfo(np.float32).max)
HOTTEST = 2.0**126
DENORMAL = float(np.finfo(np.float32).smallest_subnormal)

# Repeated values (ties), both zeros, the smallest floats, and adjacent floats.
special = st.sampled_from(
    [0.0, -0.0, DENORMAL, -DENORMAL, 1e-40, -1e-40, 1.0, 1.0 + 2.0**-23, -3.0]
)
finite = st.floats(-LARGEST, LARGEST, width=32) | st.floats(-20, 20, width=32) | special
few = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 1.5])
logit_lists = st.one_of(
    st.lists(values, min_size=SIZE, max_size=SIZE) for values in (finite, special, few)
)
# Most devices flush differences of 1e-38 to 0, so no temperature here is that small.
samplers = st.builds(
    jf.Sampler,
    temperature=st.sampled_from([0.5, 1.0, 2.0, 1e-30, 1e30, HOTTEST]),
    top_k=st.integers(0, SIZE + 2) | st.integers(0, 2**70),
    top_p=st.just(1.0) | st.floats(0, 1, exclude_min=True),
    min_p=st.just(0.0) | st.floats(0, 1),
)


@cache
def truncation():
    return jax.jit(truncate)


@settings(max_examples=20 * settings().max_examples)
@given(values=logit_lists, sampler=samplers)
@example(values=[0.0, 3.4e38, -1e37], sampler=jf.Sampler(temperature=8.5e37, min_p=0.015))
def test_top_k_top_p_and_min_p_match_their_definitions(values, sampler):
    """Truncation keeps the defined tokens, for any finite logits, with unchanged logits."""
    logits = np.float32(values)
    temperature = max(sampler.temperature, float(np.finfo(np.float32).tiny))

    def nearly(factor):
        thresholds = (min(1.0, p * factor) for p in (sampler.top_p, sampler.min_p))
        return oracle.kept(logits, temperature, sampler.top_k, *thresholds)

    # Exactly at a threshold, the result depends on rounding to float32.
    expected = nearly(1.0)
    assume((nearly(1 - 1e-4) == nearly(1 + 1e-4)).all())
    found = np.asarray(truncation()(sampler.arrays(), logits[None]))[0]
    np.testing.assert_array_equal(found > -np.inf, expected)
    np.testing.assert_array_equal(found[expected], logits[expected])


shares = st.floats(0.01, 0.99)


@settings(max_examples=5 * settings().max_examples)
@given(
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    thresholds=st.tuples(st.just(1.0) | shares, st.just(0.0) | shares, st.just(0.0) | shares),
)
def test_typical_p_epsilon_and_eta_cutoffs_match_their_definitions(seed, top_k, top_p, thresholds):
    """typical_p, epsilon_cutoff and eta_cutoff apply after top-k and top-p."""
    random = np.random.default_rng(seed)
    logits, temperature = np.float32(random.normal(size=SIZE) * 2), random.choice([0.5, 1.0, 2.0])
    sampler = jf.Sampler(temperature, top_k, top_p, 0.0, *thresholds)

    def nearly(factor):
        typical_p, *cutoffs = thresholds
        typical_p = min(1.0, typical_p * factor)
        cutoffs = [cutoff * factor for cutoff in cutoffs]
        return oracle.kept(logits, temperature, top_k, top_p * factor, 0.0, typical_p, *cutoffs)

    assume((nearly(1 - 1e-4) == nearly(1 + 1e-4)).all())
    found = np.asarray(truncation()(sampler.arrays(), logits[None]))[0]
    np.testing.assert_array_equal(found > -np.inf, nearly(1.0))


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_top_k_top_p_and_min_p_treat_negative_zero_as_equal_to_zero(zeros):
    """If −0.0 and 0.0 tie at the threshold, both are kept."""
    logits = np.float32([[-1.0, *zeros, -2.0]])
    for sampler in (jf.Sampler(top_k=1), jf.Sampler(top_p=0.3), jf.Sampler(min_p=1.0)):
        left = np.asarray(truncation()(sampler.arrays(), logits))[0] > -np.inf
        np.testing.assert_array_equal(left, [False, True, True, False])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-38, 1.0, 1e30, HOTTEST])
def test_tokens_kept_by_top_k_do_not_depend_on_temperature(temperature):
    """Truncation keeps the k largest logits even if division by the temperature makes some equal.

    A huge temperature divides all logits to 0. Subtracting a large logit rounds away differences
    between small logits.
    """
    logits = np.float32([20.0, 2e-7, 3e-7, 1e-7, -5.0])
    sampler = jf.Sampler(temperature=temperature, top_k=2)
    drawn = jax.jit(sample_tokens)(
        sampler.arrays(), jax.random.key(0), 0, np.tile(logits, (500, 1))
    )
    assert set(np.asarray(drawn).tolist()) <= {0, 2}
    left = np.asarray(truncation()(sampler.arrays(), logits[None]))[0] > -np.inf
    assert np.flatnonzero(left).tolist() == [0, 2]


@pytest.mark.slow
def test_sampling_at_the_largest_temperature_is_uniform():
    """In 4,000 samples, each of 4 tokens has the frequency 1/4 within 5 σ."""
    batch = np.tile(np.float32([9.0, 0.0, -9.0, 3.0]), (4000, 1))
    arrays = jf.Sampler(temperature=HOTTEST).arrays()
    drawn = jax.jit(sample_tokens)(arrays, jax.random.key(1), 0, batch)
    counts = np.bincount(np.asarray(drawn), minlength=4)
    assert (abs(counts - 1000) < 5 * np.sqrt(4000 * 0.25 * 0.75)).all()


def test_sampled_frequencies_match_truncated_distribution():
    """In 20,000 samples, the frequencies equal the renormalized probabilities within 5 σ."""
    logits = np.float32([2.0, 1.0, 0.5, 0.0, -1.0, -6.0])
    sampler = jf.Sampler(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02)
    number = 20_000
    batch = np.tile(logits, (number, 1))
    tokens = jax.jit(sample_tokens)(sampler.arrays(), jax.random.key(0), 0, batch)
    left = oracle.kept(logits, *astuple(sampler))
    expected = np.where(left, np.exp(logits / 0.7), 0.0)
    expected /= expected.sum()
    found = np.bincount(np.asarray(tokens), minlength=6) / number
    assert (abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / number)).all()


@pytest.mark.parametrize("name", list(jf.Sampler.__dataclass_fields__))
@pytest.mark.parametrize(
    "value", [True, np.True_, "0.7", None, float("nan"), float("inf"), 1j, [0.5], -1]
)
def test_invalid_sampler_fields_are_rejected(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be "):
        jf.Sampler(**{name: value})


@pytest.mark.parametrize("value", [1e39, pytest.param(10**400, id="1e400"), np.float64(8.6e37)])
def test_sampler_rejects_temperature_outside_float32_range(value):
    with pytest.raises(ValueError, match=r"^temperature is .*; it must be .*8\.5070592e\+37"):
        jf.Sampler(temperature=value)


@pytest.mark.parametrize("top_k", [SIZE, SIZE + 1, 2**31 - 1, 2**31, 3_000_000_000, 2**100])
def test_top_k_above_vocab_size_keeps_all_tokens(top_k):
    logits = np.arange(SIZE, dtype=np.float32)[None]
    found = truncation()(jf.Sampler(top_k=top_k).arrays(), logits)
    np.testing.assert_array_equal(found, logits)


@pytest.mark.parametrize("kind", [float, Decimal, np.float32, np.float64, np.array, jnp.float32])
def test_sampler_accepts_numbers_of_every_scalar_type(kind):
    """Samplers with numbers of any type are hashable, as keys of compiled programs."""
    sampler = jf.Sampler(kind(0.5), np.int64(3), kind(0.5), kind(0.5))
    assert sampler == jf.Sampler(0.5, 3, 0.5, 0.5) and hash(sampler) == hash(
        jf.Sampler(0.5, 3, 0.5, 0.5)
    )
    assert jf.Sampler(kind(0)).greedy
