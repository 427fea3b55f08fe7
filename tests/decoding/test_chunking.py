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
def test_extend_without_segment_ids_continues_documents(seed, chunks):
    """segment_ids=None continues each document, also after a prefill with segment_ids."""
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    plain, _ = chunked(model, variables, tokens, chunks)
    tiny.close(plain, tiny.apply(model)(variables, tokens))

    segment_ids = np.array([[0, 0, 5, 5, 5], [2, 2, 4, 4, 0]])
    _, cache = chunked(model, variables, tokens[:, :5], [5], segment_ids)
    more, _ = chunked(model, variables, tokens[:, 5:], [5, 1, 1], cache=cache)
    ids = np.concatenate([segment_ids, np.repeat([[5], [4]], 7, axis=1)], axis=1)
    tiny.close(more, np.asarray(tiny.apply(model)(variables, tokens, ids))[:, 5:])


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_prefix_lm_with_prefix_in_first_chunk_equals_single_pass(seed):
    """A prefix LM must read the prefix in one chunk; later chunks may have any lengths."""
    model = tiny.build(prefix=3, positions="sinusoidal")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits, _ = chunked(model, variables, tokens, [6, 6])
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH), chunks=cuts())
def test_logits_of_long_cached_chunks_equal_single_pass(seed, segment_ids, chunks):
    """Chunks above FEW_QUERIES, here set to 2, take a different code path after a cached text."""
    model = tiny.build(**WINDOW, rotary_base=9.0)  # a config that was not compiled before
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    with mock.patch("jaxformer.functional.tokens.FEW_QUERIES", 2):
        logits, _ = chunked(model, variables, tokens, chunks, segment_ids)
    tiny.close(logits, tiny.apply(model)(variables, tokens, segment_ids), where=segment_ids != 0)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_extend_rejects_chunk_that_ends_inside_the_prefix(seed):
    """A chunk that ends inside a prefix raises ValueError, and inside jit gives NaN.

    `generate` rejects prompts shorter than the prefix. A document shorter than the prefix is valid
    if another document follows it in the chunk.
    """
    model = tiny.build(prefix=3)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 4)
    cache = jf.init_cache(model, variables, BATCH, CAPACITY)
    torn = np.array([[1, 1, 2, 2], [1, 1, 1, 2]])
    whole = np.array([[1, 1, 1, 1], [1, 2, 2, 2]])
    with pytest.raises(ValueError, match=r"batch element 0 has 2 tokens, .*prefix has 3"):
        jf.extend(model, variables, tokens, cache, segment_ids=torn)
    logits, _ = step_in_jit(model)(variables, tokens, cache, torn)
    assert np.isnan(logits).all()
    logits, _ = jf.extend(model, variables, tokens, cache, segment_ids=whole)
    tiny.close(logits, tiny.apply(model)(variables, tokens, whole))
    with pytest.raises(ValueError, match=r"prompt 1 has 2 tokens, .* at least 3"):
        jf.generate(model, variables, [[1, 2, 3], [1, 2]], max_new_tokens=1, key=jax.random.key(0))


@cache
def step_in_jit(model):
    return jax.jit(
        lambda variables, tokens, cache, segment_ids: jf.extend(
            model, variables, tokens, cache, segment_ids=segment_ids
        )
    )


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_bfloat16_logits_of_cached_chunks_are_close_to_float32_pass(seed):
    """The cache stores the compute dtype, so the logits differ only by rounding."""
    model = tiny.build(**WINDOW, dtype="bfloat16")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits, cache = chunked(model, variables, tokens, [6, 6])
    assert cache.key_values[0].keys.dtype == jnp.bfloat16
    exact = tiny.apply(tiny.build(**WINDOW))(variables, tokens)
    tiny.close(logits, exact, 0.08)


@pytest.mark.slow
def test_number_of_used_cache_slots_grows_with_text_length():
    """The live slots grow from 48 to the capacity of 80; the logits equal those of one pass."""
    model = tiny.build(max_length=80, num_layers=1)
    variables, tokens = tiny.weights(model, 1), tiny.tokens(1, BATCH, 60)
    cache = jf.init_cache(model, variables, BATCH, 80)
    logits, _ = chunked(model, variables, tokens, [30, 30], cache=cache)
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@cache
def scanned(model):
    """Compiles one scan that reads token by token, with the whole capacity live."""

    def run(variables, tokens):
        def step(cache, token):
            logits, cache = jf.extend(model, variables, token[:, None], cache)
            return cache, logits[:, 0]

        cache = jf.init_cache(model, variables, len(tokens), 8)
        return jax.lax.scan(step, cache, tokens.T)[1].swapaxes(0, 1)

    return jax.jit(run)


@given(seed=tiny.seeds)
def test_cache_overflow_inside_jit_gives_nan(seed):
    """Up to the capacity of 8, the logits equal one pass; beyond, they are NaN."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, tiny.LENGTH)
    logits = np.asarray(scanned(model)(variables, tokens))
    tiny.close(logits[:, :8], np.asarray(tiny.apply(model)(variables, tokens))[:, :8])
    assert np.isnan(logits[:, 8:]).all()


def test_extend_rejects_chunk_larger_than_free_cache_slots():
    """Outside jit, an error gives the number of slots; inside jit, the whole chunk gives NaN.

    A chunk longer than the cache raises inside jit too, because its shape is static.
    """
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 9)
    cache = jf.init_cache(model, variables, BATCH, 8)
    _, cache = jf.extend(model, variables, tokens[:, :5], cache)
    with pytest.raises(ValueError, match=r"5 of the 8 slots .* at least 10"):
        jf.extend(model, variables, tokens[:, :5], cache)
    compiled = jax.jit(lambda tokens, cache: jf.extend(model, variables, tokens, cache)[0])
    assert np.isnan(compiled(tokens[:, :5], cache)).all()
    with pytest.raises(ValueError, match="8 slots"):
        compiled(tokens, cache)
    for wrong, message in (((0, 8), "batch_size is 0"), ((1, 0), "capacity is 0")):
        with pytest.raises(ValueError, match=message):
            jf.init_cache(model, variables, *wrong)
    with pytest.raises(ValueError, match="tokens contain id 13"):
        jf.extend(model, variables, np.full((BATCH, 1), 13), cache)
    with pytest.raises(ValueError, match="tokens has batch size 1, but the cache has batch size 2"):
        jf.extend(model, variables, tokens[:1], cache)


@pytest.mark.slow
def test_extend_rejects_document_longer_than_max_length():
    """With max_length 16, the 17th token is accepted only if it starts a new document."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 17)
    cache = jf.init_cache(model, variables, BATCH, 24)
    for part in (tokens[:, :8], tokens[:, 8:16]):
        _, cache = jf.extend(model, variables, part, cache)
    with pytest.raises(
        ValueError, match=r"document of batch element 0 has 17 tokens, but max_length is 16"
    ):
        jf.extend(model, variables, tokens[:, 16:], cache)
    logits, _ = jf.extend(model, variables, tokens[:, 16:], cache, segment_ids=[[2], [2]])
    tiny.close(logits, tiny.apply(model)(variables, tokens[:, 16:]))


@pytest.mark.slow
def test_cache_can_be_closed_over_by_a_jitted_function():
    """With a concrete cache and traced tokens, the checks that need only the cache still run."""
    model = tiny.build(prefix=3)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 6)
    cache = jf.init_cache(model, variables, BATCH, CAPACITY)
    logits = jax.jit(lambda tokens: jf.extend(model, variables, tokens, cache)[0])(tokens)
    tiny.close(logits, tiny.apply(model)(variables, tokens))
    segment_ids = np.ones((BATCH, 6), int).tolist()
    by_lists, _ = jf.extend(model, variables, tokens.tolist(), cache, segment_ids)
    tiny.close(by_lists, logits)
    tiny.close(model.apply(variables, tokens.tolist(), segment_ids), logits)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH, length=5))
def test_nan_in_masked_cache_slots_does_not_change_logits(seed, segment_ids):
    """NaN in empty and padding slots leaves the logits bitwise equal.

    The cache is immutable, so both continuations start from the same cache.
    """
    model = tiny.build(**WINDOW)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 10)
    _, cache = chunked(model, variables, tokens[:, :5], [5], segment_ids)
    unseen = (cache.tables[0].documents == 0)[:, None, :, None]

    poisoned = jax.tree.map(lambda x: jnp.where(unseen, jnp.nan, x), cache.states)
    dirty = replace(cache, states=poisoned)
    clean_logits, _ = chunked(model, variables, tokens[:, 5:], [5], cache=cache)
    dirty_logits, _ = chunked(model, variables, tokens[:, 5:], [5], cache=dirty)
    np.testing.assert_array_equal(clean_logits, dirty_logits)
    assert np.isfinite(clean_logits).all()


@pytest.mark.slow
def test_gradients_through_cache_with_nan_are_finite():
    """NaN in masked slots (0 × NaN) does not affect the gradients of weights and embeddings."""
    model = tiny.build(**WINDOW)
    variables, x = tiny.weights(model, 3), tiny.embeddings(3, BATCH, 3, model.config.embed_dim)
    cache = jf.init_cache(model, variables, BATCH, CAPACITY)
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.states)

    def total(variables, x, cache):
        return jnp.square(jf.extend(model, variables, x, cache)[0]).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    dirty = gradient(variables, x, replace(cache, states=nan))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))
    tiny.all_close(dirty, gradient(variables, x, cache), 0.0)


@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH, length=5))
def test_extend_accepts_embeddings(seed, segment_ids):
    """`extend` accepts embeddings in place of ids and scales them. Padding may hold NaN."""
    model = tiny.build(num_layers=1, scale_embeddings=True, positions="sinusoidal")
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, 5)
    vectors = np.array(variables["params"]["embedding"]["tokens"])[tokens]
    vectors[segment_ids == 0] = np.nan
    from_vectors, _ = chunked(model, variables, vectors, [5], segment_ids)
    tiny.close(
        from_vectors, tiny.apply(model)(variables, tokens, segment_ids), where=segment_ids != 0
    )
