"""Reading a text in chunks through the cache gives the logits of one pass."""

from dataclasses import replace
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jaxformer as jf
from tests.properties import tiny
from tests.properties.chunks import chunked, cuts

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
BATCH, CAPACITY = 2, tiny.LENGTH
WINDOW = {  # prefills of 5 tokens exceed the window
    "window": 3,
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "tie_embeddings": False,
}


@pytest.mark.slow
@given(seed=tiny.seeds, chunks=cuts())
def test_without_segments_a_row_goes_on(seed, chunks):
    """segments=None continues each document, also after a prefill with segments."""
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    plain, _ = chunked(model, variables, tokens, chunks)
    tiny.close(plain, tiny.apply(model)(variables, tokens))

    segments = np.array([[0, 0, 5, 5, 5], [2, 2, 4, 4, 0]])
    _, cache = chunked(model, variables, tokens[:, :5], [5], segments)
    more, _ = chunked(model, variables, tokens[:, 5:], [5, 1, 1], cache=cache)
    ids = np.concatenate([segments, np.repeat([[5], [4]], 7, axis=1)], axis=1)
    tiny.close(more, np.asarray(tiny.apply(model)(variables, tokens, ids))[:, 5:])


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_a_prefix_read_in_one_chunk_is_one_pass(seed):
    """A prefix LM must read the prefix in one chunk; the rest may come in any chunks."""
    model = tiny.build(prefix=3, positions="sinusoidal")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits, _ = chunked(model, variables, tokens, [6, 6])
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@pytest.mark.slow
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH), chunks=cuts())
def test_long_chunks_are_one_pass(seed, segments, chunks):
    """Chunks above FEW_QUERIES take another code path after a cached text; here the limit is 2."""
    model = tiny.build(**WINDOW, rotary_base=9.0)  # a config that was not compiled before
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    with mock.patch("jaxformer.functional.tokens.FEW_QUERIES", 2):
        logits, _ = chunked(model, variables, tokens, chunks, segments)
    tiny.close(logits, tiny.apply(model)(variables, tokens, segments), where=segments != 0)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_a_prefix_torn_apart_is_refused(seed):
    """A chunk that ends inside a prefix raises ValueError, and inside jit gives NaN.

    `generate` rejects prompts shorter than the prefix. A document shorter than the prefix is valid
    if another document follows it in the chunk.
    """
    model = tiny.build(prefix=3)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 4)
    cache = jf.start(model, variables, BATCH, CAPACITY)
    torn = np.array([[1, 1, 2, 2], [1, 1, 1, 2]])
    whole = np.array([[1, 1, 1, 1], [1, 2, 2, 2]])
    with pytest.raises(ValueError, match=r"row 0 ends after 2 tokens .*first 3"):
        jf.advance(model, variables, tokens, cache, segments=torn)
    logits, _ = step_in_jit(model)(variables, tokens, cache, torn)
    assert np.isnan(logits).all()
    logits, _ = jf.advance(model, variables, tokens, cache, segments=whole)
    tiny.close(logits, tiny.apply(model)(variables, tokens, whole))
    with pytest.raises(ValueError, match="prompt 1 has 2 tokens; the first 3"):
        jf.generate(model, variables, [[1, 2, 3], [1, 2]], max_new_tokens=1, key=jax.random.key(0))


@cache
def step_in_jit(model):
    return jax.jit(
        lambda variables, tokens, cache, segments: jf.advance(
            model, variables, tokens, cache, segments=segments
        )
    )


@given(seed=tiny.seeds)
def test_chunks_in_bfloat16_stay_near_one_pass_in_float32(seed):
    """The cache stores the compute dtype, so the difference is rounding only."""
    model = tiny.build(**WINDOW, dtype="bfloat16")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits, cache = chunked(model, variables, tokens, [6, 6])
    assert cache.slots[0].keys.dtype == jnp.bfloat16
    exact = tiny.apply(tiny.build(**WINDOW))(variables, tokens)
    tiny.close(logits, exact, 0.08)


@pytest.mark.slow
def test_the_live_slots_grow_with_the_text():
    """The live slots grow from 48 to 80, the capacity, and the logits stay those of one pass."""
    model = tiny.build(max_length=80, num_layers=1)
    variables, tokens = tiny.weights(model, 1), tiny.tokens(1, BATCH, 60)
    cache = jf.start(model, variables, BATCH, 80)
    logits, _ = chunked(model, variables, tokens, [30, 30], cache=cache)
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@cache
def scanned(model):
    """Compiles one scan that reads token by token, with the whole capacity live."""

    def run(variables, tokens):
        def step(cache, token):
            logits, cache = jf.advance(model, variables, token[:, None], cache)
            return cache, logits[:, 0]

        cache = jf.start(model, variables, len(tokens), 8)
        return jax.lax.scan(step, cache, tokens.T)[1].swapaxes(0, 1)

    return jax.jit(run)


@given(seed=tiny.seeds)
def test_inside_jit_it_is_one_pass_until_it_overflows_to_nan(seed):
    """Up to the capacity of 8, the logits of one pass; beyond it NaN, never a clamped write."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits = np.asarray(scanned(model)(variables, tokens))
    tiny.close(logits[:, :8], np.asarray(tiny.apply(model)(variables, tokens))[:, :8])
    assert np.isnan(logits[:, 8:]).all()


def test_a_chunk_that_does_not_fit_is_refused():
    """Outside jit the error counts the slots; inside jit the whole chunk gives NaN.

    A chunk longer than the cache raises inside jit too, because its shape is static.
    """
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 9)
    cache = jf.start(model, variables, BATCH, 8)
    _, cache = jf.advance(model, variables, tokens[:, :5], cache)
    with pytest.raises(ValueError, match=r"8 slots with 5 used.* at least 10"):
        jf.advance(model, variables, tokens[:, :5], cache)
    compiled = jax.jit(lambda tokens, cache: jf.advance(model, variables, tokens, cache)[0])
    assert np.isnan(compiled(tokens[:, :5], cache)).all()
    with pytest.raises(ValueError, match="8 slots"):
        compiled(tokens, cache)
    for wrong, message in (((0, 8), "batch_size is 0"), ((1, 0), "capacity is 0")):
        with pytest.raises(ValueError, match=message):
            jf.start(model, variables, *wrong)
    with pytest.raises(ValueError, match="tokens hold id 13"):
        jf.advance(model, variables, np.full((BATCH, 1), 13), cache)
    with pytest.raises(ValueError, match="tokens have 1 rows; the cache was started for 2"):
        jf.advance(model, variables, tokens[:1], cache)


def test_more_tokens_of_a_document_than_positions_are_rejected():
    """16 tokens are accepted in chunks. The 17th is not, unless it starts a new document."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 17)
    cache = jf.start(model, variables, BATCH, 24)
    for part in (tokens[:, :8], tokens[:, 8:16]):
        _, cache = jf.advance(model, variables, part, cache)
    with pytest.raises(ValueError, match=r"row 0 ends after 17 tokens .*max_length is 16"):
        jf.advance(model, variables, tokens[:, 16:], cache)
    logits, _ = jf.advance(model, variables, tokens[:, 16:], cache, segments=[[2], [2]])
    tiny.close(logits, tiny.apply(model)(variables, tokens[:, 16:]))


@pytest.mark.slow
def test_a_cache_from_outside_may_be_closed_over_in_jit():
    """The cache is concrete and the tokens are traced: checks on the cache alone still run."""
    model = tiny.build(prefix=3)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 6)
    cache = jf.start(model, variables, BATCH, CAPACITY)
    logits = jax.jit(lambda tokens: jf.advance(model, variables, tokens, cache)[0])(tokens)
    tiny.close(logits, tiny.apply(model)(variables, tokens))
    segments = np.ones((BATCH, 6), int).tolist()
    by_lists, _ = jf.advance(model, variables, tokens.tolist(), cache, segments)
    tiny.close(by_lists, logits)
    tiny.close(model.apply(variables, tokens.tolist(), segments), logits)


@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH, length=5))
def test_nan_in_slots_that_nobody_may_see_reaches_nothing(seed, segments):
    """NaN in empty and padding slots leaves the logits bitwise equal.

    The cache is immutable, so both continuations start from the same one.
    """
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 10)
    _, cache = chunked(model, variables, tokens[:, :5], [5], segments)
    unseen = (cache.tables[0].documents == 0)[:, None, :, None]

    poisoned = jax.tree.map(lambda x: jnp.where(unseen, jnp.nan, x), cache.states)
    dirty = replace(cache, states=poisoned)
    clean_logits, _ = chunked(model, variables, tokens[:, 5:], [5], cache=cache)
    dirty_logits, _ = chunked(model, variables, tokens[:, 5:], [5], cache=dirty)
    np.testing.assert_array_equal(clean_logits, dirty_logits)
    assert np.isfinite(clean_logits).all()


def test_gradients_through_a_poisoned_cache_are_finite():
    """0 × NaN does not reach the gradients of weights and embeddings."""
    model = tiny.build(**WINDOW)
    variables, x = tiny.weights(model, 3), tiny.embeddings(3, BATCH, 3, model.config.embed_dim)
    cache = jf.start(model, variables, BATCH, CAPACITY)
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.states)

    def total(variables, x, cache):
        return jnp.square(jf.advance(model, variables, x, cache)[0]).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    dirty = gradient(variables, x, replace(cache, states=nan))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))
    tiny.all_close(dirty, gradient(variables, x, cache), 0.0)


@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH, length=5))
def test_embeddings_are_read_like_tokens(seed, segments):
    """`advance` accepts embeddings in place of ids and scales them. Padding may hold NaN."""
    model = tiny.build(num_layers=1, scale_embeddings=True, positions="sinusoidal")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 5)
    rows = np.array(variables["params"]["embedding"]["tokens"])[tokens]
    rows[segments == 0] = np.nan
    by_row, _ = chunked(model, variables, rows, [5], segments)
    tiny.close(by_row, tiny.apply(model)(variables, tokens, segments), where=segments != 0)
