"""Bugs of layers as values: stacks of layers that differ, windows beside full layers."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

OWN_LAYER = "models/test_own_layer.py"
OWN_VALUES = "models/test_own_values.py"
PLAIN = "functional/layers/test_plain.py"
VALUES = "artifacts/test_values.py"
REWIND = "decoding/test_rewind.py"
WINDOWS = "decoding/test_windows.py"

BUGS = (
    Bug(
        "a scan takes the weights of another layer of its group",
        "functional.stack:_by_period",
        Replace("tuple(n for n in numbers if first <= n < first + period)", "tuple(numbers)"),
        f"{OWN_LAYER}::test_scanned_and_unrolled_layers_give_equal_logits",
    ),
    Bug(
        "layers of unequal shapes are put back in the order of their groups",
        "functional.stack:Stack.layer_trees",
        Replace("[trees[number] for number in range(len(self.layers))]", "list(trees.values())"),
        f"{OWN_LAYER}::test_cached_chunks_through_user_defined_sublayer_equal_one_pass",
    ),
    Bug(
        "attention of a user's mask sees empty slots",
        "functional.layers.attention:Attention.__post_init__",
        Replace("self.mask & Packed()", "self.mask"),
        f"{OWN_LAYER}::test_attention_without_a_packing_mask_stays_within_documents",
    ),
    Bug(
        "a sub-layer's own state is not kept",
        "functional.cache.key_values:Cache.with_states",
        Replace("{**old, **new}", "{**new, **old}"),
        f"{OWN_LAYER}::test_cached_chunks_through_user_defined_sublayer_equal_one_pass",
    ),
    Bug(
        "a sub-layer that cannot decode is decoded",
        "functional.model:Model._kept",
        Replace("sublayer.rule() is not None", "False"),
        f"{OWN_LAYER}::test_error_for_invalid_layers_names_layer_and_sublayer",
    ),
    Bug(
        "features of different widths are added",
        "models.builders.parts:check_widths",
        lambda _: lambda stack, head: None,
        "models/test_mixed_layers.py::test_error_for_mismatched_layer_width_names_layer_and_sublayer",
    ),
    Bug(
        "a chunk longer than a ring sees only its last tokens",
        "functional.cache.table:TokenTable.append",
        Replace("overwrites and self.num_slots >= ring.reach", "False"),
        f"{WINDOWS}::test_chunked_window_attention_equals_single_pass",
    ),
    Bug(
        "early tokens of a long chunk overwrite its last ones in a ring",
        "functional.cache.table:Ring.append",
        Replace(
            "is_kept = is_real & (numbers >= next_token[:, None] - num_slots)",
            "is_kept = is_real & (numbers < self.next_token[:, None] + num_slots)",
        ),
        f"{WINDOWS}::test_chunked_window_attention_equals_single_pass",
    ),
    Bug(
        "layers with a window keep all tokens beside full layers",
        "functional.cache.key_values:_table_sizes",
        Replace("size.ring is None and reach is not None and reach + SPARE < most", "False"),
        f"{WINDOWS}::test_layer_with_window_attention_caches_only_its_window",
    ),
    Bug(
        "a part of a long window's ring is copied at each step",
        "functional.cache.table:TokenTable.append",
        Replace("overwrites and self.num_slots >= ring.reach", "overwrites"),
        f"{WINDOWS}::test_reading_ring_buffer_before_it_wraps_around_copies_no_keys",
    ),
    Bug(
        "a large ring is cut beside a small one",
        "functional.cache.key_values:Cache.live_prefix",
        Replace(
            "max((table.num_slots for table in self.tables), default=0)",
            "min((table.num_slots for table in self.tables), default=0)",
        ),
        f"{WINDOWS}::test_cache_prefix_smaller_than_the_largest_ring_buffer_is_rejected",
    ),
    Bug(
        "counters of a ring widen with 64-bit defaults",
        "functional.cache.table:Ring.append",
        Replace("is_real.sum(axis=1, dtype=jnp.int32)", "is_real.sum(axis=1)"),
        "test_x64.py::test_extending_a_cache_under_x64_creates_no_64_bit_arrays",
    ),
    Bug(
        "the inputs after each token count its padding",
        "functional.layers.token_order:TokenOrder._newest_after_each",
        Replace("self.documents is not None", "False"),
        f"{REWIND}::test_recurrent_states_can_be_rewound_within_the_last_call",
    ),
    Bug(
        "a rewound state is that of one token less",
        "functional.cache.slots:TokenStates.rewind",
        Replace("self.longest_rewind - lengths", "self.longest_rewind - lengths + (lengths > 1)"),
        f"{REWIND}::test_recurrent_states_can_be_rewound_within_the_last_call",
    ),
    Bug(
        "the delta rule keeps the memory before each token",
        "functional.layers.gated_delta:gated_delta_rule",
        Replace("jnp.swapaxes(memories, 0, 1)", "jnp.roll(jnp.swapaxes(memories, 0, 1), 1, 1)"),
        f"{REWIND}::test_recurrent_states_can_be_rewound_within_the_last_call",
    ),
    Bug(
        "a state is rewound beyond the last call in a compiled program",
        "functional.cache.key_values:Cache.rewind",
        Replace("longest = jnp.minimum(longest, x.longest_rewind)", "pass"),
        f"{REWIND}::test_recurrent_states_can_be_rewound_only_if_earlier_states_were_kept",
    ),
    Bug(
        "a loaded layer differs from the saved layer",
        "artifacts.values:_read",
        Replace("kind(**values)", "kind()"),
        f"{OWN_LAYER}::test_user_defined_sublayer_is_saved_by_name_and_loaded_with_its_class",
    ),
    Bug(
        "a class with the name of one of the library is taken for it",
        "artifacts.values:_registered_name",
        Replace("_KNOWN.get(own.__qualname__) is own", "own.__qualname__ in _KNOWN"),
        f"{VALUES}::test_user_class_with_the_name_of_a_library_class_is_loaded",
    ),
    Bug(
        "a lambda is saved by its name",
        "artifacts.values:_registered_name",
        Replace("'<' in own.__qualname__", "False"),
        f"{VALUES}::test_stored_function_without_name_is_rejected_with_field_name",
    ),
    Bug(
        "a file makes a class stand for a function",
        "artifacts.values:_found",
        Replace("isinstance(x, type) == (kind == 'class')", "True"),
        f"{VALUES}::test_stored_value_cannot_name_arbitrary_python_objects",
    ),
    Bug(
        "the first of several classes with equal names is loaded",
        "artifacts.values:_found",
        Replace("[x for x in named if x.__module__ == module] or named", "named[:1]"),
        f"{VALUES}::test_stored_classes_of_equal_name_are_distinguished_by_module",
    ),
    Bug(
        "a saved model loses its mask",
        "artifacts.saved:OWN",
        Replace(
            "('mask', 'layers', 'activation', 'positions')",
            "('layers', 'activation', 'positions')",
        ),
        f"{OWN_VALUES}::test_saved_model_is_loaded_with_its_user_defined_mask",
    ),
    Bug(
        "an exported model loses its mask",
        "artifacts.saved:check_of_config",
        Replace("not (name == 'mask' and _has_equal_masks(model, plain))", "name != 'mask'"),
        f"{OWN_VALUES}::test_unsavable_model_is_rejected_before_writing_files",
    ),
    Bug(
        "a mask beside layers of the user is ignored",
        "models.language_model:LanguageModel.architecture",
        Replace("getattr(own, name) is not None and self.layers is not None", "False"),
        f"{OWN_VALUES}::test_unsavable_model_is_rejected_before_writing_files",
    ),
    Bug(
        "an encoder encodes with the layers of its config",
        "models.kinds:Encoder.encode",
        Replace("self.architecture", "build_encoder(self.config)"),
        f"{OWN_VALUES}::test_encoder_uses_user_defined_layers",
    ),
    Bug(
        "initial weights do not depend on the user's activation",
        "functional.layers.feedforward:activation_power",
        Replace("density / density.sum()", "density"),
        "functional/test_initial.py::test_user_defined_activation_preserves_signal_variance",
    ),
    Bug(
        "doctor: a user's experts are not recognised by their weights",
        "doctor.experts:_expert_weight_sizes",
        Replace("shape is None or 'experts' not in axes", "shape is None or axes[0] != 'expert'"),
        "doctor/test_experts.py::test_doctor_detects_custom_sublayer_that_computes_all_experts",
    ),
    # ---- layers without residuals
    Bug(
        "a layer without a residual adds its input",
        "functional.layers.plain:Plain.__call__",
        Replace(
            "self.sublayer_output(weights, y, at)",
            "x + self.sublayer_output(weights, y, at)",
        ),
        f"{PLAIN}::test_layer_without_residual_equals_formula",
    ),
    Bug(
        "the rule of a user's layers always has a residual",
        "verify.rules:_user_layer_rule",
        Replace("part.adds", "True"),
        f"{PLAIN}::test_dependencies_of_layers_match_their_masks_and_residuals",
    ),
    Bug(
        "more experts of a token make the initial output smaller",
        "functional.layers.experts:Experts.init",
        Replace("self.experts_per_token * share**2", "1.0"),
        f"{PLAIN}::test_initial_weights_of_layers_without_residual_preserve_mean_square",
    ),
    Bug(
        "the second activation makes the initial output smaller",
        "functional.layers.plain:ActivatedFeedForward.init",
        Replace("initial.gain(power)", "1.0"),
        f"{PLAIN}::test_initial_weights_of_layers_without_residual_preserve_mean_square",
    ),
    Bug(
        "a grouped key is initialized for one query head only",
        "functional.layers.plain:MatchedAttention.init",
        Replace("query.sum(axis=2)", "query[:, :, 0]"),
        f"{PLAIN}::test_each_query_scores_its_own_key_highest_at_initialization_without_residuals",
    ),
)
