"""`fill` returns the most probable tokens at each masked position only."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding import batches
from jaxformer.decoding.fill import fill
from jaxformer.models.parameters import init

pytestmark = pytest.mark.usefixtures("quick_compilation")

MASK = 28
CONFIG = jf.EncoderConfig(vocab_size=29, max_length=40, num_layers=1, embed_dim=8, num_heads=2)
MODEL = jf.build(CONFIG)
# The smallest and the largest length of each bucket, and max_length; few programs are compiled.
of_length = {n: st.lists(st.integers(0, MASK), min_size=n, max_size=n) for n in (1, 32, 33, 40)}
sequences = st.lists(
    st.sampled_from(list(of_length)).flatmap(of_length.get), min_size=1, max_size=2
)


@pytest.fixture(scope="module")
def variables():
    return jax.tree.map(lambda x: 5 * x, init(MODEL, jax.random.key(0)))


@pytest.mark.slow
@given(sequences=sequences, top_k=st.sampled_from([1, 4]))
def test_fill_returns_most_probable_tokens(variables, sequences, top_k):
    """The predictions equal those from the logits of each text alone."""
    for sequence, found in zip(
        sequences, fill(MODEL, variables, sequences, MASK, top_k), strict=True
    ):
        assert found.positions.tolist() == [i for i, token in enumerate(sequence) if token == MASK]
        logits = np.asarray(jax.jit(MODEL.apply)(variables, np.array([sequence])), np.float64)[0]
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        best = np.sort(shares[found.positions], axis=-1)[:, ::-1][:, :top_k]
        np.testing.assert_allclose(found.probabilities, best, rtol=1e-4)
        chosen = np.take_along_axis(shares[found.positions], found.tokens, axis=-1)
        np.testing.assert_allclose(chosen, best, rtol=1e-4)


@pytest.mark.slow
def test_filling_several_batches_equals_filling_one_batch(variables, monkeypatch):
    """The batch size is given by the caller, or limited to 1 by the memory limit."""
    sequences = [[MASK, *range(n), MASK] for n in (3, 9, 1, 20, 5)]
    at_once = fill(MODEL, variables, sequences, MASK, 2)
    with monkeypatch.context() as patched:
        patched.setattr(batches, "BATCH_BYTES", 1)
        for batch_size in (2, None):
            found = fill(MODEL, variables, sequences, MASK, 2, batch_size=batch_size)
            for one, other in zip(found, at_once, strict=True):
                np.testing.assert_array_equal(one.positions, other.positions)
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-5)


@pytest.mark.slow
def test_fill_error_for_nan_logits_names_the_batch_element():
    model = jf.build(replace(CONFIG, tie_embeddings=False))
    variables = init(model, jax.random.key(0))
    table = variables["params"]["embedding"]["tokens"]
    variables["params"]["embedding"]["tokens"] = table.at[7].set(np.nan)
    sequences = [[MASK, 1], [MASK, 2], [MASK, 3], [MASK, 7], [MASK, 4]]
    with pytest.raises(FloatingPointError, match="logits of batch element 3 are not finite"):
        fill(model, variables, sequences, MASK, batch_size=2)


@pytest.mark.parametrize(
    "sequences, top_k, message",
    [
        ([[1, 29]], 1, "text 0 contains id 29, but vocab_size is 29"),
        ([[1] * 41], 1, "the longest text has 41 tokens; 1 to 40 are accepted"),
        ([[]], 1, "the longest text has 0 tokens"),
        ([[MASK]], 30, r"top_k is 30; it must be in 1 … vocab_size \(29\)"),
    ],
)
def test_fill_rejects_invalid_arguments(variables, sequences, top_k, message):
    with pytest.raises(ValueError, match=message):
        fill(MODEL, variables, sequences, MASK, top_k)


def test_fill_raises_error_for_nan_weights(variables):
    broken = jax.tree.map(lambda x: x * np.nan, variables)
    with pytest.raises(FloatingPointError):
        fill(MODEL, broken, [[MASK]], MASK)


def test_fill_rejects_causal_models():
    model = jf.build(
        jf.DecoderConfig(vocab_size=29, max_length=8, num_layers=1, embed_dim=8, num_heads=2)
    )
    with pytest.raises(ValueError, match="model has class Decoder, but fill needs an Encoder"):
        fill(model, init(model, jax.random.key(0)), [[MASK]], MASK)
