"""`fill` returns the most probable tokens at each mask, and nothing elsewhere."""

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
# Few lengths, so that few programs compile: both ends of the buckets of `fill`, and max_length.
of_length = {n: st.lists(st.integers(0, MASK), min_size=n, max_size=n) for n in (1, 32, 33, 40)}
rows = st.lists(st.sampled_from(list(of_length)).flatmap(of_length.get), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def variables():
    return jax.tree.map(lambda x: 5 * x, init(MODEL, jax.random.key(0)))


@pytest.mark.slow
@given(rows=rows, top_k=st.sampled_from([1, 4]))
def test_each_mask_has_the_most_probable_tokens(variables, rows, top_k):
    """They follow from the logits of the text alone, whatever else is in the batch."""
    for row, found in zip(rows, fill(MODEL, variables, rows, MASK, top_k), strict=True):
        assert found.positions.tolist() == [i for i, token in enumerate(row) if token == MASK]
        logits = np.asarray(jax.jit(MODEL.apply)(variables, np.array([row])), np.float64)[0]
        shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        best = np.sort(shares[found.positions], axis=-1)[:, ::-1][:, :top_k]
        np.testing.assert_allclose(found.probabilities, best, rtol=1e-4)
        chosen = np.take_along_axis(shares[found.positions], found.tokens, axis=-1)
        np.testing.assert_allclose(chosen, best, rtol=1e-4)


def test_rows_in_batches_are_filled_in_as_in_one_batch(variables, monkeypatch):
    """In batches of a given size, and of as many rows as the bound of memory allows: one here."""
    rows = [[MASK, *range(n), MASK] for n in (3, 9, 1, 20, 5)]
    at_once = fill(MODEL, variables, rows, MASK, 2)
    with monkeypatch.context() as patched:
        patched.setattr(batches, "BATCH_BYTES", 1)
        for batch_size in (2, None):
            found = fill(MODEL, variables, rows, MASK, 2, batch_size=batch_size)
            for one, other in zip(found, at_once, strict=True):
                np.testing.assert_array_equal(one.positions, other.positions)
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-5)


def test_a_broken_row_of_a_later_batch_is_named_by_its_number():
    model = jf.build(replace(CONFIG, tie_embeddings=False))
    variables = init(model, jax.random.key(0))
    table = variables["params"]["embedding"]["tokens"]
    variables["params"]["embedding"]["tokens"] = table.at[7].set(np.nan)
    rows = [[MASK, 1], [MASK, 2], [MASK, 3], [MASK, 7], [MASK, 4]]
    with pytest.raises(FloatingPointError, match="logits of row 3 are not finite"):
        fill(model, variables, rows, MASK, batch_size=2)


@pytest.mark.parametrize(
    "rows, top_k, message",
    [
        ([[1, 29]], 1, "row 0 holds id 29; vocab_size is 29"),
        ([[1] * 41], 1, "rows have up to 41 tokens; 1 … 40 are accepted"),
        ([[]], 1, "rows have up to 0 tokens"),
        ([[MASK]], 30, r"top_k is 30; it must be in 1 … vocab_size \(29\)"),
    ],
)
def test_invalid_fill_arguments_are_rejected(variables, rows, top_k, message):
    with pytest.raises(ValueError, match=message):
        fill(MODEL, variables, rows, MASK, top_k)


def test_nan_weights_raise(variables):
    broken = jax.tree.map(lambda x: x * np.nan, variables)
    with pytest.raises(FloatingPointError):
        fill(MODEL, broken, [[MASK]], MASK)


def test_a_causal_model_is_rejected():
    model = jf.build(
        jf.DecoderConfig(vocab_size=29, max_length=8, num_layers=1, embed_dim=8, num_heads=2)
    )
    with pytest.raises(ValueError, match="model is a Decoder; fill needs an Encoder"):
        fill(model, init(model, jax.random.key(0)), [[MASK]], MASK)
