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
        "cuDNN: a document is one token longer",
        "functional.attention.cudnn:lengths_and_offsets",
        Replace("belongs.sum(axis=-1)", "belongs.sum(axis=-1) + 1"),
        f"{CUDNN}::test_packed_rows",
    ),
    Bug(
        "cuDNN: padding anywhere counts as padding at the end",
        "functional.attention.cudnn:is_padded_at_the_end",
        gives(np.True_),
        f"{CUDNN}::test_padded_rows",
    ),
    Bug(
        "cuDNN: documents that are too many are left out",
        "functional.attention.cudnn:documents_fit",
        gives(np.True_),
        f"{CUDNN}::test_other_packed_rows_are_computed_blockwise",
    ),
    Bug(
        "cuDNN: a window sees one token more",
        "functional.attention.cudnn:rows_attention",
        Replace("rule.window - 1", "rule.window"),
        f"{CUDNN}::test_dense_rows",
    ),
    Bug(
        "cuDNN: the scale is lost",
        "functional.attention.cudnn:rows_attention",
        Replace("rule.scale", "1.0"),
        f"{CUDNN}::test_dense_rows",
    ),
    Bug(
        "cuDNN: offsets of grouped keys are those of queries",
        "functional.attention.cudnn:documents_attention",
        Replace("repeats = query.shape[1] // key.shape[1]", "repeats = 1"),
        f"{CUDNN}::test_packed_rows",
    ),
    Bug(
        "cuDNN: the outputs of padding are what memory held",
        "functional.attention.cudnn:documents_attention",
        Replace("jnp.where((documents != 0)[:, None, :, None], output, 0)", "output"),
        f"{CUDNN}::test_packed_rows",
    ),
    Bug(
        "cuDNN: a row of padding has no key",
        "functional.attention.cudnn:rows_attention",
        Replace(
            "jnp.maximum((segments != 0).sum(axis=-1, dtype=jnp.int32), 1)",
            "(segments != 0).sum(axis=-1, dtype=jnp.int32)",
        ),
        f"{CUDNN}::test_padded_rows",
    ),
    Bug(
        "cuDNN: keys have the documents of the queries",
        "functional.attention.cudnn:CuDNN.attention",
        Replace("~(same & documents_fit(segments))", "~documents_fit(segments)"),
        f"{CUDNN}::test_documents_by_any_numbers_are_computed_blockwise",
    ),
    # ---- tokamax's kernel
    Bug(
        "tokamax: a document begins one token early",
        "functional.attention.key_ranges:runs",
        Replace("jnp.where(begins, index, 0)", "jnp.where(begins, jnp.maximum(index - 1, 0), 0)"),
        f"{TOKAMAX}::test_packed_rows",
    ),
    Bug(
        "tokamax: a document ends one token early",
        "functional.attention.key_ranges:runs",
        Replace("jnp.where(ends, index + 1, len(index))", "jnp.where(ends, index, len(index))"),
        f"{TOKAMAX}::test_ranges_that_are_exact_are_those_of_the_mask",
    ),
    Bug(
        "fused: every document counts as contiguous",
        "functional.attention.key_ranges:only_rise",
        gives(np.True_),
        f"{TOKAMAX}::test_packed_rows {SPLASH}::test_packed_rows "
        f"{CUDNN}::test_documents_by_any_numbers_are_computed_blockwise",
    ),
    Bug(
        "tokamax: padding at the beginning is seen",
        "functional.attention.key_ranges:key_ranges",
        Replace("first = real.argmax(axis=-1, keepdims=True)", "first = 0"),
        f"{TOKAMAX}::test_padded_rows {TOKAMAX}::test_ranges_that_are_exact_are_those_of_the_mask",
    ),
    Bug(
        "tokamax: a query without keys has no range",
        "functional.attention.tokamax:_attention_in_ranges",
        Replace("jnp.where(sees, low, substitute)", "low"),
        f"{TOKAMAX}::test_dense_rows",
    ),
    Bug(
        "tokamax: a query without keys sees one",
        "functional.attention.tokamax:_attention_in_ranges",
        Replace("jnp.where(sees[:, None, :, None], output, 0)", "output"),
        f"{TOKAMAX}::test_dense_rows",
    ),
    Bug(
        "tokamax: the cap is lost",
        "functional.attention.tokamax:Tokamax.attention",
        Replace("context.scores.cap", "None"),
        f"{TOKAMAX}::test_scale_and_cap",
    ),
    Bug(
        "tokamax: the scale is lost",
        "functional.attention.tokamax:Tokamax.attention",
        Replace("context.scores.factor", "1.0"),
        f"{TOKAMAX}::test_scale_and_cap",
    ),
    Bug(
        "tokamax: a bias is lost",
        "functional.attention.tokamax:_unsupported",
        Replace("context.scores.bias is not None", "False"),
        f"{TOKAMAX}::test_what_the_kernel_lacks_is_refused_with_the_reason",
    ),
    Bug(
        "tokamax: keys have the documents of the queries",
        "functional.attention.key_ranges:key_ranges",
        Replace("same & only_rise(keys.segments)", "only_rise(keys.segments)"),
        f"{TOKAMAX}::test_documents_of_queries_that_differ_from_those_of_keys",
    ),
    Bug(
        "fused: the positions of keys count as those of the row",
        "functional.attention.key_ranges:has_other_positions",
        Replace("(context.queries, context.keys)", "(context.queries,)"),
        f"{TOKAMAX}::test_no_kernel_ignores_positions",
    ),
    Bug(
        "fused: documents that are not packed keep their own positions",
        "functional.attention.key_ranges:has_other_positions",
        Replace("context.in_order and is_packed(context)", "context.in_order"),
        f"{TOKAMAX}::test_positions_in_documents_need_packed_documents",
    ),
    Bug(
        "tokamax: the largest head_dim of a Hopper GPU is that of any",
        "functional.attention.tokamax:Tokamax.unsupported_reason",
        Replace("MOST_HEAD_DIM.get(self.generation, 0)", "MOST_HEAD_DIM[9]"),
        f"{TOKAMAX}::test_the_version_and_the_gpu_are_checked",
    ),
    Bug(
        "cuDNN: a mask is taken for the mask that it derives from",
        "functional.attention.cudnn:CuDNN._unsupported",
        Replace(
            "type(rule) in (Causal, Window, *RUN_TIME)",
            "isinstance(rule, (Causal, Window, *RUN_TIME))",
        ),
        f"{OWN_CLASSES}::test_a_subclass_of_a_mask_has_its_own_rule_in_every_implementation",
    ),
    Bug(
        "fused: scores are taken for the scores that they derive from",
        "functional.attention.fused_kernels:unsupported_scores",
        gives(None),
        f"{OWN_CLASSES}::test_a_subclass_of_scores_is_refused_by_fused_kernels"
        "_and_computed_blockwise",
    ),
    # ---- the splash kernel
    Bug(
        "splash: documents see each other",
        "functional.attention.splash:visible_ids",
        Replace(
            "query, key = queries.segments, keys.segments",
            "query, key = queries.segments != 0, keys.segments != 0",
        ),
        f"{SPLASH}::test_packed_rows",
    ),
    Bug(
        "splash: a query without keys sees padding's id",
        "functional.attention.splash:sees_statically",
        then(lambda sees: sees | True),
        f"{SPLASH}::test_a_rule_of_the_user",
    ),
    Bug(
        "splash: rows of whole lanes count as rows without padding",
        "functional.attention.splash:Plan.hides_padding",
        Replace(
            "self.sizes == (self.queries, self.keys)",
            "self.queries % LANES == 0 and self.keys % LANES == 0",
        ),
        f"{SPLASH}::test_the_mask_of_a_call_without_ids_hides_padding_at_any_length "
        f"{SPLASH}::test_rows_of_whole_lanes_that_are_padded_to_whole_blocks",
    ),
    Bug(
        "splash: the cap is lost",
        "functional.attention.splash:splash_attention",
        Replace("context.scores.cap", "None"),
        f"{SPLASH}::test_scale_and_cap",
    ),
    Bug(
        "splash: the scale is lost",
        "functional.attention.splash:splash_attention",
        Replace("context.scores.factor * query.astype(jnp.float32)", "query.astype(jnp.float32)"),
        f"{SPLASH}::test_scale_and_cap",
    ),
    Bug(
        "splash: a window sees one token more",
        "functional.attention.splash:Plan.mask",
        Replace("min(windows) - 1", "min(windows)"),
        f"{SPLASH}::test_dense_rows",
    ),
    Bug(
        "splash: positions of the caller count as those of the row",
        "functional.attention.splash:_unsupported",
        Replace("not by_distance", "False"),
        f"{SPLASH}::test_what_the_kernel_lacks_is_refused_with_the_reason",
    ),
)
