"""The cache: slots, positions, and what lies in empty ones."""

from tests.mutation.quoted import (
    AUTOREGRESSIVE,
    CHUNKING,
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
