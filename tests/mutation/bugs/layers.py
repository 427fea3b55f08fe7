"""Bugs of layers as values: stacks of layers that differ, windows beside full layers."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

OWN_LAYER = "models/test_own_layer.py"
REWIND = "decoding/test_rewind.py"
WINDOWS = "decoding/test_windows.py"

BUGS = (
    Bug(
        "a scan takes the weights of another layer of its group",
        "functional.stack:_by_period",
        Replace("tuple(n for n in numbers if first <= n < first + period)", "tuple(numbers)"),
        f"{OWN_LAYER}::test_a_scan_is_the_unrolled_stack",
    ),
    Bug(
        "layers of unequal shapes are put back in the order of their groups",
        "functional.stack:Stack.layer_trees",
        Replace("[trees[number] for number in range(len(self.layers))]", "list(trees.values())"),
        f"{OWN_LAYER}::test_chunks_equal_one_pass",
    ),
    Bug(
        "attention of a user's mask sees empty slots",
        "functional.layers.attention:Attention.__post_init__",
        Replace("self.mask & Packed()", "self.mask"),
        f"{OWN_LAYER}::test_attention_with_any_mask_holds_within_documents",
    ),
    Bug(
        "a sub-layer's own state is not kept",
        "functional.cache.key_values:Cache.with_states",
        Replace("{**old, **new}", "{**new, **old}"),
        f"{OWN_LAYER}::test_chunks_equal_one_pass",
    ),
    Bug(
        "a sub-layer that cannot decode is decoded",
        "functional.model:Model._kept",
        Replace("sublayer.rule() is not None", "False"),
        f"{OWN_LAYER}::test_what_does_not_fit_is_refused_by_layer_and_name",
    ),
    Bug(
        "features of two widths are added",
        "models.builders.parts:check_widths",
        lambda _: lambda stack, head: None,
        "models/test_mixed_layers.py::test_a_width_that_does_not_fit_is_refused_by_layer_and_name",
    ),
    Bug(
        "a chunk longer than a ring sees only its last tokens",
        "functional.cache.table:SlotTable.append",
        Replace("overwrites and self.slots >= ring.reach", "False"),
        f"{WINDOWS}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "early tokens of a long chunk overwrite its last ones in a ring",
        "functional.cache.table:Ring.append",
        Replace(
            "is_kept = is_real & (numbers >= next_token[:, None] - slots)",
            "is_kept = is_real & (numbers < self.next_token[:, None] + slots)",
        ),
        f"{WINDOWS}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "layers with a window keep all tokens beside full layers",
        "functional.cache.key_values:_table_sizes",
        Replace("size.ring is None and reach is not None and reach + SPARE < most", "False"),
        f"{WINDOWS}::test_a_layer_keeps_its_window",
    ),
    Bug(
        "a part of a long window's ring is copied at each step",
        "functional.cache.table:SlotTable.append",
        Replace("overwrites and self.slots >= ring.reach", "overwrites"),
        f"{WINDOWS}::test_a_part_of_a_ring_is_read_in_place",
    ),
    Bug(
        "a large ring is cut beside a small one",
        "functional.cache.key_values:Cache.live_prefix",
        Replace(
            "max((table.slots for table in self.tables), default=0)",
            "min((table.slots for table in self.tables), default=0)",
        ),
        f"{WINDOWS}::test_the_largest_ring_must_be_whole",
    ),
    Bug(
        "counters of a ring widen with 64-bit defaults",
        "functional.cache.table:Ring.append",
        Replace("is_real.sum(axis=1, dtype=jnp.int32)", "is_real.sum(axis=1)"),
        "test_x64.py::test_a_pass_keeps_the_dtypes_of_the_cache",
    ),
    Bug(
        "the inputs after each token count its padding",
        "functional.layers.token_order:TokenOrder._newest_after_each",
        Replace("self.documents is not None", "False"),
        f"{REWIND}::test_states_are_rewound_to_any_token_of_the_last_call",
    ),
    Bug(
        "a rewound state is that of one token less",
        "functional.cache.slots:TokenStates.rewind",
        Replace("self.longest_rewind - lengths", "self.longest_rewind - lengths + (lengths > 1)"),
        f"{REWIND}::test_states_are_rewound_to_any_token_of_the_last_call",
    ),
    Bug(
        "the delta rule keeps the memory before each token",
        "functional.layers.gated_delta:gated_delta_rule",
        Replace("jnp.swapaxes(memories, 0, 1)", "jnp.roll(jnp.swapaxes(memories, 0, 1), 1, 1)"),
        f"{REWIND}::test_states_are_rewound_to_any_token_of_the_last_call",
    ),
    Bug(
        "a state is rewound beyond the last call in a compiled program",
        "functional.cache.key_values:Cache.rewind",
        Replace("longest = jnp.minimum(longest, x.longest_rewind)", "pass"),
        f"{REWIND}::test_states_are_kept_only_if_asked_for",
    ),
    Bug(
        "a loaded layer is not that of the file",
        "artifacts.values:_read",
        Replace("classes[name](**own)", "classes[name]()"),
        f"{OWN_LAYER}::test_it_is_saved_by_name_and_loaded_with_its_class",
    ),
)
