"""Bugs of the sub-layers that read other tokens in the place of attention."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, takes

INTERLEAVED = "hub/test_model_type.py::test_delta_rule_projections_are_interleaved_by_key_head"
DELTA = "functional/layers/test_gated_delta.py"
FORMULA = "properties/test_invariance.py::test_decoder_logits_equal_float64_reference_loops"
SHORT = "functional/layers/test_short_convolution.py"
CONVOLUTION = "functional.layers.short_convolution"
ORDER = "functional.layers.token_order:TokenOrder"

BUGS = (
    # ---- convolutions
    Bug(
        "a convolution reads the inputs of the document before",
        f"{CONVOLUTION}:causal_convolution",
        Replace("order.positions >= distance", "order.positions >= 0"),
        f"{SHORT}::test_gated_short_convolution_equals_formula "
        f"{SHORT}::test_convolution_is_correct_if_documents_end_at_chunk_ends",
    ),
    Bug(
        "the filter of a convolution is reversed",
        f"{CONVOLUTION}:causal_convolution",
        Replace(
            "jnp.where(in_document, read, 0) * rows[begin]",
            "jnp.where(in_document, read, 0) * rows[distance]",
        ),
        f"{SHORT}::test_gated_short_convolution_equals_formula",
    ),
    Bug(
        "padding shifts the last inputs of a convolution",
        f"{ORDER}.newest",
        Replace("self.documents is None", "True"),
        f"{SHORT}::test_convolution_in_chunks_of_any_size_equals_one_pass "
        f"{SHORT}::test_padding_does_not_change_convolution_outputs_and_state",
    ),
    Bug(
        "the last inputs of a convolution are those of the new chunk alone",
        f"{ORDER}.newest",
        takes(x=lambda x: x.at[:, :2].set(0)),
        f"{SHORT}::test_convolution_in_chunks_of_any_size_equals_one_pass",
    ),
    Bug(
        "padding stands between the last inputs of a convolution and the next tokens",
        f"{ORDER}.of",
        Replace("documents == 0", "documents != 0"),
        f"{SHORT}::test_convolution_in_chunks_of_any_size_equals_one_pass",
    ),
    Bug(
        "the gates of a short convolution are swapped",
        "functional.layers.short_convolution:short_convolution",
        Replace("before * value", "after * value"),
        f"{SHORT}::test_gated_short_convolution_equals_formula",
    ),
    Bug(
        "a short convolution keeps no state",
        "functional.layers.short_convolution:ShortConvolution.init_state",
        gives(None),
        f"{SHORT}::test_generation_with_short_convolution_equals_uncached_passes",
    ),
    Bug(
        "a layer of several types has the tensors of its place among its type",
        "hub.table:entries",
        Replace("(layers[place[0]], *place[1:])", "place"),
        "hub/test_model_type.py::test_exported_tensors_of_mixed_layer_types_are_numbered_by_depth",
    ),
    # ---- the gated delta rule
    Bug(
        "the delta rule decays the memory after its correction",
        "functional.layers.gated_delta:gated_delta_rule.step",
        Replace("jnp.exp(log_decay)[..., None, None] * memory", "memory"),
        f"{DELTA}::test_steps_and_chunks_of_delta_rule_equal_formula",
    ),
    Bug(
        "a chunk reads the memory of an earlier document",
        "functional.layers.gated_delta:_delta_of_chunk",
        Replace("(number == 0)[:, None]", "(number >= 0)[:, None]"),
        f"{DELTA}::test_steps_and_chunks_of_delta_rule_equal_formula",
    ),
    Bug(
        "corrections reach the next chunk without their decay",
        "functional.layers.gated_delta:_delta_of_chunk",
        Replace("decay[:, :, -1, :, None] * key", "key"),
        f"{DELTA}::test_steps_and_chunks_of_delta_rule_equal_formula",
    ),
    Bug(
        "padding decays the memory",
        "functional.layers.gated_delta:GatedDelta.project_inputs",
        Replace("jnp.where(is_token, log_decay, 0)", "log_decay"),
        f"{DELTA}::test_padding_does_not_change_the_logits",
    ),
    Bug(
        "value heads read the key heads in turn, as if tiled",
        "functional.layers.gated_delta:GatedDelta.project_inputs",
        Replace("jnp.repeat(part, group, axis=1)", "jnp.tile(part, (1, group, 1, 1))"),
        FORMULA,
    ),
    Bug(
        "a chunked pass begins with an empty memory",
        "functional.layers.gated_delta:GatedDelta.__call__",
        Replace(
            "chunked_delta_rule(inputs, memory, _chunk_size(length))",
            "chunked_delta_rule(inputs, 0 * memory, _chunk_size(length))",
        ),
        f"{DELTA}::test_model_with_delta_rule_in_cached_chunks_equals_one_pass",
    ),
    Bug(
        "parts of a key head of unequal widths are cut into equal ones",
        "hub.table:_cut",
        Replace("np.cumsum([x[-1] // num_groups for x in shapes])[:-1]", "len(shapes)"),
        INTERLEAVED,
    ),
    Bug(
        "weights of the delta rule are interleaved by the heads of attention",
        "hub.table:entries",
        Replace("getattr(config, layout.groups)", "config.num_heads"),
        INTERLEAVED,
    ),
    Bug(
        "the memory is one for all devices at first, inside a shard_map",
        "functional.layers.gated_delta:GatedDelta.__call__",
        Replace("vary_alike(memory, inputs)", "(memory, None)"),
        "models/test_shard_map.py::test_each_device_computes_its_own_batch_elements",
    ),
    Bug(
        "a user's mask is the rule of the gated delta rule",
        "verify.rules:_layer_rule",
        Replace("kind == 'gated_delta'", "False"),
        f"{DELTA}::test_user_defined_mask_changes_only_attention_layers",
    ),
)
