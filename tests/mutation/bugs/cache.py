"""The cache: slots, positions, and what lies in empty ones."""

from tests.mutation.quoted import (
    AUTOREGRESSIVE,
    CACHE,
    CHUNKING,
    DECODER,
    GENERATION,
    POSITIONS,
    TRANSFORMER,
    Bug,
)

BUGS = (
    # ---- cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "the position offset forgets the past",
        POSITIONS,
        "jnp.where(begins, tokens_before, -cursor.position[:, None])",
        "jnp.where(begins, tokens_before, 0)",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "what is read on stands one position too far",
        POSITIONS,
        "jnp.where(begins, tokens_before, -cursor.position[:, None])",
        "jnp.where(begins, tokens_before, -cursor.position[:, None] - (cursor.position > 0)[:, None])",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "cache written one slot late",
        CACHE,
        "    return write_slots(slots, new.reshape(-1, *new.shape[2:]), length)",
        "    return write_slots(slots, new.reshape(-1, *new.shape[2:]), length + 1)",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "a long chunk counts its positions from 0",
        TRANSFORMER,
        "query, key, value, mask, new, slots, config.attention_scale",
        "query, key, value, mask, TokenInfo(new.length), slots, config.attention_scale",
        f"{CHUNKING}::test_long_chunks_are_one_pass",
    ),
    Bug(
        "overflow overwrites the last slot unnoticed",  # flax nnx attention
        TRANSFORMER,
        "    x = jnp.where(length <= cache.capacity, x, jnp.nan)\n",
        "",
        f"{CHUNKING}::test_inside_jit_it_is_one_pass_until_it_overflows_to_nan",
    ),
    Bug(
        "what stands in empty slots reaches the output",
        CACHE,
        "            return jnp.where(jnp.repeat(used, heads, axis=0)[:, :, None], x[:, :slots], 0)",
        "            return x[:, :slots]",
        f"{CHUNKING}::test_nan_in_slots_that_nobody_may_see_reaches_nothing "
        f"{CHUNKING}::test_gradients_through_a_poisoned_cache_are_finite",
    ),
    Bug(
        "steps see a block too few of live slots",
        "decoding/generate.py",
        "        read += STEPS\n        state, new",
        "        state, new",
        f"{GENERATION}::test_long_generation_goes_on_past_every_bucket",
    ),
    Bug(
        "the cache reads a prefix causally",
        DECODER,
        "before, mask = cache.cursor.position, self_attention_mask(config, mask)",
        "before, mask = cache.cursor.position, Causal() & Packed()",
        f"{CHUNKING}::test_a_prefix_read_in_one_chunk_is_one_pass",
    ),
    Bug(
        "slots already used are not counted",
        "decoding/autoregressive.py",
        "    used = 0 if traced else int(cache.length)",
        "    used = 0 if traced else 0 * int(cache.length)",
        f"{CHUNKING}::test_a_chunk_that_does_not_fit_is_refused",
    ),
    Bug(
        "live slots do not grow",
        "decoding/autoregressive.py",
        "min(cache.capacity, slots(needed))",
        "min(cache.capacity, slots(1))",
        f"{CHUNKING}::test_the_live_slots_grow_with_the_text",
    ),
    Bug(
        "without segments a new document begins",
        POSITIONS,
        "jnp.maximum(cursor.segment, 1)",
        "jnp.ones_like(cursor.segment)",
        f"{CHUNKING}::test_without_segments_a_row_goes_on",
    ),
    Bug(
        "the cache is float32 whatever the dtype",
        TRANSFORMER,
        "        jnp.dtype(config.dtype),\n",
        "        jnp.float32,\n",
        f"{CHUNKING}::test_chunks_in_bfloat16_stay_near_one_pass_in_float32",
    ),
)
