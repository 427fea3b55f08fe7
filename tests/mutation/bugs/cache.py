"""Bugs of the cache: slots, positions and empty slots."""

from dataclasses import replace

from tests.mutation.bug import AUTOREGRESSIVE, CHUNKING, INSPECT, REWIND, Bug
from tests.mutation.changes import Replace, gives, inside, takes

CACHE_MODEL = "decoding/test_cache_model.py::test_any_sequence_of_operations_is_a_full_pass"
ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass"


def without_hooks(forward):
    def broken(self, weights, inputs, run, cache=None, *sources, **named):
        if cache is not None:
            run = replace(run, hooks=type(run.hooks)())
        return forward(self, weights, inputs, run, cache, *sources, **named)

    return broken


def forgets_oldest(append):
    def broken(self, is_real, slots):
        ring, written = append(self, is_real, slots)
        return replace(ring, oldest=ring.next_token - slots), written

    return broken


BUGS = (
    # ---- cache: x-transformers#219, torchtune#959, transformers#15751
    Bug(
        "positions restart in each cached chunk",
        "functional.positions:document_positions",
        takes(cursor=lambda cursor: cursor._replace(position=0 * cursor.position)),
        ANY_CHUNKING,
    ),
    Bug(
        "a first pass sees padding of the prompts",
        "functional.tokens:Tokens.self_attention",
        Replace(
            "context = self._without_slots(mask, scores)",
            "context = replace(self, new=replace(self.new, segments=None))"
            "._without_slots(mask, scores)",
        ),
        "decoding/test_prefill.py::test_it_reads_what_advance_reads",
    ),
    Bug(
        "cached tokens are read one position too far",
        "functional.positions:document_positions",
        takes(cursor=lambda x: x._replace(position=x.position + (x.position > 0))),
        ANY_CHUNKING,
    ),
    Bug(
        "slots already used are not counted",
        "decoding.loop_cache:checked_slots",
        inside("int", gives(0)),  # the slots in use
        f"{CHUNKING}::test_a_chunk_that_does_not_fit_is_refused",
    ),
    Bug(
        "live slots do not grow",
        "decoding.loop_cache:live_slots",
        lambda live_slots: lambda cache, needed: live_slots(cache, 1),
        f"{CHUNKING}::test_the_live_slots_grow_with_the_text",
    ),
    Bug(
        "without segments a chunk starts a new document",
        "functional.positions:continued_segments",
        takes(cursor=lambda x: x._replace(segment=1 + 0 * x.segment)),
        f"{CHUNKING}::test_without_segments_a_row_goes_on",
    ),
    Bug(
        "the cache ignores the config's dtype",
        "functional.cache.key_values:init_cache",
        takes(dtype=lambda _: "float32"),
        f"{CHUNKING}::test_chunks_in_bfloat16_stay_near_one_pass_in_float32",
    ),
    Bug(
        "hooks are ignored in a step with a cache",
        "functional.model:Model.forward",
        without_hooks,
        f"{INSPECT}::test_chunks_capture_what_one_pass_does "
        f"{INSPECT}::test_a_patch_at_positions_is_the_same_in_cached_decoding",
    ),
    # ---- rings
    Bug(
        "a ring's keys and values are written one slot late",
        "functional.cache.slots:write_slots",
        takes(written=lambda written: written + 1 if written.ndim else written),
        f"{REWIND}::test_a_ring_of_few_slots_is_one_pass",
    ),
    Bug(
        "a chunk one token longer than a ring takes is read as a shorter one",
        "functional.cache.table:SlotTable.append",
        Replace("self.slots - ring.reach + 1", "self.slots - ring.reach + 2"),
        f"{REWIND}::test_any_chunk_fits_a_ring",
    ),
    Bug(
        "a rewound ring writes after the forgotten tokens",
        "functional.cache.table:Ring.rewind",
        lambda rewind: lambda self, lengths: self,
        f"{REWIND}::test_a_ring_can_be_rewound_by_its_spare_slots",
    ),
    Bug(
        "a rewound ring forgets which tokens were overwritten",
        "functional.cache.table:Ring.append",
        forgets_oldest,
        CACHE_MODEL,
    ),
)
