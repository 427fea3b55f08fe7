"""Bugs of layers as values: stacks of layers that differ, windows beside full layers."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

OWN_LAYER = "models/test_own_layer.py"
WINDOWS = "decoding/test_windows.py"

BUGS = (
    Bug(
        "a scan takes the weights of another layer of its group",
        "functional.stack:_periods",
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
        "models.own_layers:check_widths",
        lambda _: lambda stack, head: None,
        "models/test_mixed_layers.py::test_a_width_that_does_not_fit_is_refused_by_layer_and_name",
    ),
    Bug(
        "a chunk longer than a ring sees only its last tokens",
        "functional.cache.table:SlotTable.append",
        Replace("tokens.length > self.slots - ring.reach + 1", "False"),
        f"{WINDOWS}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "early tokens of a long chunk overwrite its last ones in a ring",
        "functional.cache.ring:Ring.append",
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
        "a loaded layer is not that of the file",
        "artifacts.values:_read",
        Replace("classes[name](**own)", "classes[name]()"),
        f"{OWN_LAYER}::test_it_is_saved_by_name_and_loaded_with_its_class",
    ),
)
