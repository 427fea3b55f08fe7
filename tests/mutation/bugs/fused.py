"""Bugs in the fused attention kernels' arguments."""

import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, then

SPLASH = "functional/attention/test_splash.py"
CUDNN = "functional/attention/test_cudnn.py"
TOKAMAX = "functional/attention/test_tokamax.py"
OWN_CLASSES = "functional/test_own_classes.py"

BUGS = (
    # ---- cuDNN's kernel
    Bug(
        "cuDNN: a document is one token too long",
        "functional.attention.cudnn:lengths_and_offsets",
        Replace("belongs.sum(axis=-1)", "belongs.sum(axis=-1) + 1"),
        f"{CUDNN}::test_cudnn_attention_within_packed_documents_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: padding anywhere counts as padding at the end",
        "functional.attention.cudnn:is_padded_at_the_end",
        gives(np.True_),
        f"{CUDNN}::test_cudnn_attention_with_padding_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: documents beyond the supported number are dropped",
        "functional.attention.cudnn:documents_fit",
        gives(np.True_),
        f"{CUDNN}::test_cudnn_attention_on_non_contiguous_documents_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: a window has one token too many",
        "functional.attention.cudnn:single_document_attention",
        Replace("rule.window - 1", "rule.window"),
        f"{CUDNN}::test_cudnn_attention_without_padding_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: the scale is lost",
        "functional.attention.cudnn:single_document_attention",
        Replace("rule.scale", "1.0"),
        f"{CUDNN}::test_cudnn_attention_without_padding_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: offsets of grouped keys are those of queries",
        "functional.attention.cudnn:documents_attention",
        Replace("repeats = query.shape[1] // key.shape[1]", "repeats = 1"),
        f"{CUDNN}::test_cudnn_attention_within_packed_documents_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: the outputs at padding are uninitialised memory",
        "functional.attention.cudnn:documents_attention",
        Replace("jnp.where((documents != 0)[:, None, :, None], output, 0)", "output"),
        f"{CUDNN}::test_cudnn_attention_within_packed_documents_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: a sequence of padding has an empty key range",
        "functional.attention.cudnn:single_document_attention",
        Replace(
            "jnp.maximum((segment_ids != 0).sum(axis=-1, dtype=jnp.int32), 1)",
            "(segment_ids != 0).sum(axis=-1, dtype=jnp.int32)",
        ),
        f"{CUDNN}::test_cudnn_attention_with_padding_equals_unfused_attention",
    ),
    Bug(
        "cuDNN: keys have the documents of the queries",
        "functional.attention.cudnn:CuDNN.attention",
        Replace("~(same & documents_fit(segment_ids))", "~documents_fit(segment_ids)"),
        f"{CUDNN}::test_cudnn_attention_on_unsorted_segment_ids_equals_unfused_attention",
    ),
    # ---- tokamax's kernel
    Bug(
        "tokamax: a document begins one token early",
        "functional.attention.key_ranges:runs",
        Replace("jnp.where(begins, index, 0)", "jnp.where(begins, jnp.maximum(index - 1, 0), 0)"),
        f"{TOKAMAX}::test_tokamax_attention_within_packed_documents_equals_unfused_attention",
    ),
    Bug(
        "tokamax: a document ends one token early",
        "functional.attention.key_ranges:runs",
        Replace("jnp.where(ends, index + 1, len(index))", "jnp.where(ends, index, len(index))"),
        f"{TOKAMAX}::test_key_ranges_passed_to_tokamax_contain_exactly_the_unmasked_keys",
    ),
    Bug(
        "fused: every document counts as contiguous",
        "functional.attention.key_ranges:only_rise",
        gives(np.True_),
        f"{TOKAMAX}::test_tokamax_attention_within_packed_documents_equals_unfused_attention "
        f"{SPLASH}::test_splash_attention_within_packed_documents_equals_unfused_attention "
        f"{CUDNN}::test_cudnn_attention_on_unsorted_segment_ids_equals_unfused_attention",
    ),
    Bug(
        "tokamax: padding at the beginning is seen",
        "functional.attention.key_ranges:key_ranges",
        Replace("first = real.argmax(axis=-1, keepdims=True)", "first = 0"),
        f"{TOKAMAX}::test_tokamax_attention_with_padding_equals_unfused_attention "
        f"{TOKAMAX}::test_key_ranges_passed_to_tokamax_contain_exactly_the_unmasked_keys",
    ),
    Bug(
        "tokamax: a query without keys has no range",
        "functional.attention.tokamax:_attention_in_ranges",
        Replace("jnp.where(sees, low, substitute)", "low"),
        f"{TOKAMAX}::test_tokamax_attention_without_padding_equals_unfused_attention",
    ),
    Bug(
        "tokamax: a query without keys attends to one key",
        "functional.attention.tokamax:_attention_in_ranges",
        Replace("jnp.where(sees[:, None, :, None], output, 0)", "output"),
        f"{TOKAMAX}::test_tokamax_attention_without_padding_equals_unfused_attention",
    ),
    Bug(
        "tokamax: the cap is lost",
        "functional.attention.tokamax:Tokamax.attention",
        Replace("context.scores.cap", "None"),
        f"{TOKAMAX}::test_tokamax_attention_with_scale_and_softcap_equals_unfused_attention",
    ),
    Bug(
        "tokamax: the scale is lost",
        "functional.attention.tokamax:Tokamax.attention",
        Replace("context.scores.factor", "1.0"),
        f"{TOKAMAX}::test_tokamax_attention_with_scale_and_softcap_equals_unfused_attention",
    ),
    Bug(
        "tokamax: a bias is lost",
        "functional.attention.tokamax:_unsupported",
        Replace("context.scores.bias is not None", "False"),
        f"{TOKAMAX}::test_error_for_unsupported_attention_arguments_states_the_reason",
    ),
    Bug(
        "tokamax: keys have the documents of the queries",
        "functional.attention.key_ranges:key_ranges",
        Replace("same & only_rise(keys.segment_ids)", "only_rise(keys.segment_ids)"),
        f"{TOKAMAX}::test_queries_and_keys_with_different_segment_ids_are_accepted",
    ),
    Bug(
        "fused: positions of keys are taken for indices in the sequence",
        "functional.attention.key_ranges:has_other_positions",
        Replace("(context.queries, context.keys)", "(context.queries,)"),
        f"{TOKAMAX}::test_fused_kernels_reject_positions_in_descending_order",
    ),
    Bug(
        "fused: documents that are not packed keep their own positions",
        "functional.attention.key_ranges:has_other_positions",
        Replace("context.in_order and is_packed(context)", "context.in_order"),
        f"{TOKAMAX}::test_fused_kernel_rejects_restarting_positions_without_packing_mask",
    ),
    Bug(
        "tokamax: the largest head_dim of a Hopper GPU is that of any",
        "functional.attention.tokamax:Tokamax.unsupported_reason",
        Replace("MOST_HEAD_DIM.get(self.generation, 0)", "MOST_HEAD_DIM[9]"),
        f"{TOKAMAX}::test_tokamax_kernel_reports_unsupported_version_and_gpu",
    ),
    Bug(
        "cuDNN: a subclass of a mask is treated as the base class",
        "functional.attention.cudnn:CuDNN._unsupported",
        Replace(
            "type(rule) in (Causal, Window, *RUN_TIME)",
            "isinstance(rule, (Causal, Window, *RUN_TIME))",
        ),
        f"{OWN_CLASSES}::test_mask_subclass_sets_visibility_in_every_attention_implementation",
    ),
    Bug(
        "fused: a subclass of scores is treated as the base class",
        "functional.attention.fused_kernels:unsupported_scores",
        gives(None),
        f"{OWN_CLASSES}::test_attention_with_a_user_defined_subclass_of_scores_is_computed_blockwise",
    ),
    # ---- the splash kernel
    Bug(
        "splash: documents see each other",
        "functional.attention.splash:visible_ids",
        Replace(
            "query, key = queries.segment_ids, keys.segment_ids",
            "query, key = queries.segment_ids != 0, keys.segment_ids != 0",
        ),
        f"{SPLASH}::test_splash_attention_within_packed_documents_equals_unfused_attention",
    ),
    Bug(
        "splash: a query without keys sees padding's id",
        "functional.attention.splash:sees_statically",
        then(lambda sees: sees | True),
        f"{SPLASH}::test_splash_attention_with_user_defined_mask_equals_unfused_attention",
    ),
    Bug(
        "splash: lengths that fill whole lanes count as unpadded",
        "functional.attention.splash:Plan.hides_padding",
        Replace(
            "self.sizes == (self.queries, self.keys)",
            "self.queries % LANES == 0 and self.keys % LANES == 0",
        ),
        f"{SPLASH}::test_splash_mask_without_segment_ids_hides_padding_for_any_sequence_length "
        f"{SPLASH}::test_splash_attention_at_lengths_divisible_by_128_equals_unfused_attention",
    ),
    Bug(
        "splash: the cap is lost",
        "functional.attention.splash:splash_attention",
        Replace("context.scores.cap", "None"),
        f"{SPLASH}::test_splash_attention_with_scale_and_softcap_equals_unfused_attention",
    ),
    Bug(
        "splash: the scale is lost",
        "functional.attention.splash:splash_attention",
        Replace("context.scores.factor * query.astype(jnp.float32)", "query.astype(jnp.float32)"),
        f"{SPLASH}::test_splash_attention_with_scale_and_softcap_equals_unfused_attention",
    ),
    Bug(
        "splash: a window has one token too many",
        "functional.attention.splash:Plan.mask",
        Replace("min(windows) - 1", "min(windows)"),
        f"{SPLASH}::test_splash_attention_without_padding_equals_unfused_attention",
    ),
    Bug(
        "splash: explicit positions are taken for indices in the sequence",
        "functional.attention.splash:_unsupported",
        Replace("not by_distance", "False"),
        f"{SPLASH}::test_error_for_unsupported_attention_arguments_states_the_reason",
    ),
)
