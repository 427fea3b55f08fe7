"""The cache: slots, positions, and what lies in empty ones."""

from tests.mutation.bug import AUTOREGRESSIVE, CHUNKING, INSPECT, REWIND, Bug
from tests.mutation.changes import Replace

ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass"


def without_hooks(forward):
    def broken(*args, cache=None, **named):
        if cache is not None:
            named.pop("hooks", None)
        return forward(*args, cache=cache, **named)

    return broken


BUGS = (
    # ---- cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "the position offset forgets the past",
        "functional.positions:document_positions",
        Replace("-cursor.position[:, None]", "0"),
        ANY_CHUNKING,
    ),
    Bug(
        "what is read on stands one position too far",
        "functional.positions:document_positions",
        Replace(
            "-cursor.position[:, None]",
            "-cursor.position[:, None] - (cursor.position > 0)[:, None]",
        ),
        ANY_CHUNKING,
    ),
    Bug(
        "slots already used are not counted",
        "decoding.autoregressive:_check_room",
        Replace("int(cache.length)", "0"),
        f"{CHUNKING}::test_a_chunk_that_does_not_fit_is_refused",
    ),
    Bug(
        "live slots do not grow",
        "decoding.autoregressive:live_slots",
        lambda live_slots: lambda cache, needed: live_slots(cache, 1),
        f"{CHUNKING}::test_the_live_slots_grow_with_the_text",
    ),
    Bug(
        "without segments a new document begins",
        "functional.positions:continued_segments",
        Replace("jnp.maximum(cursor.segment, 1)", "jnp.ones_like(cursor.segment)"),
        f"{CHUNKING}::test_without_segments_a_row_goes_on",
    ),
    Bug(
        "the cache is float32 whatever the dtype",
        "functional.transformer:start",
        Replace("jnp.dtype(config.dtype)", "jnp.float32"),
        f"{CHUNKING}::test_chunks_in_bfloat16_stay_near_one_pass_in_float32",
    ),
    Bug(
        "hooks are ignored in a step with a cache",
        "functional.transformer:forward",
        without_hooks,
        f"{INSPECT}::test_chunks_capture_what_one_pass_does "
        f"{INSPECT}::test_a_patch_at_positions_is_the_same_in_cached_decoding",
    ),
    # ---- rings
    Bug(
        "a ring's keys and values are written one slot late",
        "functional.slots:write_slots",
        Replace(
            "by_head(slots, len(new)).at[rows, :, written]",
            "by_head(slots, len(new)).at[rows, :, written + 1]",
        ),
        f"{REWIND}::test_a_ring_of_few_slots_is_one_pass",
    ),
    Bug(
        "a ring takes one token too many at once",
        "functional.cache:Cache.append",
        Replace("new > self.slots - self.reach + 1", "new > self.slots - self.reach + 2"),
        f"{REWIND}::test_what_a_ring_cannot_do_is_refused",
    ),
    Bug(
        "a rewound ring goes on behind what it forgot",
        "functional.cache:Cache.rewind",
        Replace("next_slot - lengths", "next_slot"),
        f"{REWIND}::test_a_ring_can_be_rewound_by_its_spare_slots",
    ),
)
