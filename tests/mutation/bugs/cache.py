"""Bugs of the cache: slots, positions and empty slots."""

from dataclasses import replace

from tests.mutation.bug import AUTOREGRESSIVE, CHUNKING, INSPECT, REWIND, Bug
from tests.mutation.changes import Replace, gives, inside, takes

CACHE_MODEL = (
    "decoding/test_cache_model.py::test_logits_after_random_cache_operations_equal_full_pass"
)
ANY_CHUNKING = f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass"


def without_hooks(forward):
    def broken(self, weights, inputs, run, cache=None, *sources, **named):
        if cache is not None:
            run = replace(run, hooks=type(run.hooks)())
        return forward(self, weights, inputs, run, cache, *sources, **named)

    return broken


def forgets_oldest(append):
    def broken(self, is_real, num_slots):
        ring, written = append(self, is_real, num_slots)
        return replace(ring, oldest=ring.next_token - num_slots), written

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
        "prefill attends to the padding of prompts",
        "functional.tokens:Tokens.self_attention",
        Replace(
            "context = self._within_sequence(mask, scores)",
            "context = replace(self, new=replace(self.new, segment_ids=None))"
            "._within_sequence(mask, scores)",
        ),
        "decoding/test_prefill.py::test_prefill_function_gives_the_same_logits_and_cache_as_the_extend_function",
    ),
    Bug(
        "cached tokens are read one position too far",
        "functional.positions:document_positions",
        takes(cursor=lambda x: x._replace(position=x.position + (x.position > 0))),
        ANY_CHUNKING,
    ),
    Bug(
        "used cache slots are not counted",
        "decoding.loop_cache:checked_slots",
        inside("int", gives(0)),  # the slots in use
        f"{CHUNKING}::test_extend_rejects_chunk_larger_than_free_cache_slots",
    ),
    Bug(
        "the number of live cache slots does not grow",
        "decoding.loop_cache:live_slots",
        lambda live_slots: lambda cache, needed: live_slots(cache, 1),
        f"{CHUNKING}::test_number_of_used_cache_slots_grows_with_text_length",
    ),
    Bug(
        "without segment_ids a chunk starts a new document",
        "functional.positions:continued_segment_ids",
        takes(cursor=lambda x: x._replace(segment=1 + 0 * x.segment)),
        f"{CHUNKING}::test_extend_without_segment_ids_continues_documents",
    ),
    Bug(
        "the cache ignores the config's dtype",
        "functional.cache.key_values:empty_cache",
        takes(dtype=lambda _: "float32"),
        f"{CHUNKING}::test_bfloat16_logits_of_cached_chunks_are_close_to_float32_pass",
    ),
    Bug(
        "hooks are ignored in a step with a cache",
        "functional.model:Model.forward",
        without_hooks,
        f"{INSPECT}::test_cached_chunks_capture_the_same_values_as_a_single_pass "
        f"{INSPECT}::test_patch_at_positions_gives_equal_logits_with_and_without_cache",
    ),
    # ---- rings
    Bug(
        "a ring's keys and values are written one slot late",
        "functional.cache.slots:write_key_values",
        takes(written=lambda written: written + 1 if written.ndim else written),
        f"{REWIND}::test_logits_of_ring_buffer_cache_equal_single_pass",
    ),
    Bug(
        "a chunk one token longer than a ring takes is read as a shorter one",
        "functional.cache.table:TokenTable.append",
        Replace("self.num_slots - ring.reach + 1", "self.num_slots - ring.reach + 2"),
        f"{REWIND}::test_ring_buffer_accepts_chunks_of_any_length",
    ),
    Bug(
        "a rewound ring writes after the forgotten tokens",
        "functional.cache.table:Ring.rewind",
        lambda rewind: lambda self, lengths: self,
        f"{REWIND}::test_ring_buffer_cache_rewinds_as_far_as_its_spare_slots_allow",
    ),
    Bug(
        "a rewound ring forgets which tokens were overwritten",
        "functional.cache.table:Ring.append",
        forgets_oldest,
        CACHE_MODEL,
    ),
)
