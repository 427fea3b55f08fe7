"""Bugs of masks, padding and packing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from tests.mutation.bug import (
    ATTENTION,
    AUTOREGRESSIVE,
    CHUNKING,
    DEPENDENCY,
    FORMULA,
    INVARIANCE,
    JACOBIAN,
    ONE_DOCUMENT,
    OWN_MASK,
    PERTURBED,
    TABLES,
    Bug,
)
from tests.mutation.changes import Replace, gives, inside, takes, then


def queries_stand(further):
    """Evaluates a rule for queries whose positions are shifted by `further`."""

    def change(call):
        def broken(self, query, key):
            return call(self, replace(query, positions=query.position_ids() + further), key)

        return broken

    return change


def of_one_more(call):
    return lambda self, query, key: call(replace(self, size=self.size + 1), query, key)


def begins_late(key_range):
    return lambda self, start, stop, length: key_range(self, start + 1, stop, length)


def causal_alone(self_attention):
    def broken(self, mask, scores):
        from jaxformer.functional.attention.masks import Causal, Packed

        mask = mask if self.cache_views is None else Causal() & Packed()
        return self_attention(self, mask, scores)

    return broken


def looks_everywhere(short_tiles):
    def broken(places):
        for rows, columns, visible in short_tiles(places):
            yield rows, columns, None if isinstance(visible, np.ndarray) else visible

    return broken


def sees_all_but_padding(call):
    def broken(self, query, key):
        from jaxformer.functional.attention.masks import Padding

        return Padding()(query, key)

    return broken


def in_order(places):
    sides = (replace(info, positions=None) for info in (places.queries, places.keys))
    return type(places)(places.mask, *sides)


def numbers_on(document_positions):
    def broken(segment_ids, cursor):
        documents, _, after = document_positions(segment_ids, cursor)
        one = cursor._replace(segment=jnp.ones_like(cursor.segment))
        return documents, document_positions(jnp.minimum(segment_ids, 1), one)[1], after

    return broken


OWN_CLASSES = "functional/test_own_classes.py"

BUGS = (
    # ---- masks: transformers#31673, #39408, #29623; keras#23038
    Bug(
        "the causal mask shows the next token",
        "functional.attention.masks:Causal.__call__",
        queries_stand(1),
        JACOBIAN,
    ),
    Bug(
        "the causal mask hides the query's own token",
        "functional.attention.masks:Causal.__call__",
        queries_stand(-1),
        f"{DEPENDENCY}::test_dependencies_without_residual_connections_equal_composed_masks",
    ),
    Bug(
        "a sliding window has one token too many",
        "functional.attention.masks:Window.__call__",
        of_one_more,
        PERTURBED,
    ),
    Bug(
        "the key range of a window is one token too short",
        "functional.attention.masks:Window.key_range",
        begins_late,
        f"{ONE_DOCUMENT} {ATTENTION}::test_attention_without_explicit_positions_equals_formula",
    ),
    Bug(
        "scores are multiplied by the mask",
        "functional.attention.attend:attend",
        inside("jnp.where", lambda _: lambda visible, scores, low: scores * visible),
        FORMULA,
    ),
    Bug(
        "blockwise attention shows tokens after the query",
        "functional.attention.blockwise:_short_tiles",
        looks_everywhere,
        ONE_DOCUMENT,
    ),
    Bug(
        "norm statistics are computed over positions",  # nanochat#844
        "functional.layers.norms:rms_norm",
        inside("jnp.square", then(lambda squares: squares.mean(axis=-2, keepdims=True))),
        PERTURBED,
    ),
    Bug(
        "the prefix of a prefix-LM is causal",
        "functional.attention.masks:Prefix.__call__",
        lambda call: lambda self, query, key: call(replace(self, length=0), query, key),
        f"{JACOBIAN}[prefix-explicit-scan-none-float32]",
    ),
    # ---- packing and padding: maxtext#4476, transformers#46634; unsloth#3699; pytorch#103963
    Bug(
        "packed documents attend to each other",
        "functional.attention.masks:Packed.__call__",
        sees_all_but_padding,
        f"{INVARIANCE}::test_packed_document_has_the_logits_of_the_document_alone",
    ),
    Bug(
        "positions do not restart in a packed document",
        "functional.positions:document_positions",
        numbers_on,
        f"{INVARIANCE}::test_packed_document_has_the_logits_of_the_document_alone",
    ),
    Bug(
        "all batch elements get the positions of the first one",  # unsloth#3699
        "functional.positions:document_positions",
        then(lambda x: (x[0], jnp.where(x[0] > 0, x[1][:1], 0), x[2])),
        f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass "
        f"{AUTOREGRESSIVE}::test_packed_document_has_the_logits_of_a_separate_document "
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "padding inside a document counts in positions",
        "functional.positions:document_positions",
        Replace(
            "jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid",
            "jnp.arange(valid.shape[1]) + jnp.zeros_like(segment_ids)",
        ),
        f"{INVARIANCE}::test_packed_document_has_the_logits_of_the_document_alone",
    ),
    Bug(
        "padding is not zeroed",
        "functional.embedding:without_padding",
        lambda without_padding: lambda x, segment_ids: x,
        f"{INVARIANCE}::test_nan_in_padding_changes_neither_loss_nor_gradients "
        f"{AUTOREGRESSIVE}::test_nan_in_padding_changes_neither_logits_nor_gradients "
        "properties/test_source.py::test_nan_in_source_padding_does_not_change_loss_and_gradients "
        "models/test_encoder.py::test_nan_in_padding_changes_neither_encoder_loss_nor_gradients",
    ),
    Bug(
        "a fully masked query gives NaN",
        "functional.attention.formula:softmax",
        lambda _: lambda scores, sink=None: jax.nn.softmax(scores),
        f"{ATTENTION}::test_query_without_visible_keys_gives_zeros_and_finite_gradients",
    ),
    Bug(
        "blockwise: a fully masked query has weights in the gradient",
        "functional.attention.tiles:log_sum_exp",
        lambda log_total: lambda largest, total: largest + jnp.log(total),
        f"{ATTENTION}::test_query_without_visible_keys_gives_zeros_and_finite_gradients",
    ),
    # ---- mask arrays, and skipped blocks
    Bug(
        "a tile of a mask array takes the wrong query rows",
        "functional.attention.masks:DenseMask.tile",
        takes(rows=lambda rows: slice(0, rows.stop - rows.start)),
        f"{TABLES}::test_attention_with_mask_array_equals_formula "
        f"{DEPENDENCY}::test_dependencies_through_all_layers_equal_boolean_product_of_their_masks",
    ),
    Bug(
        "fully masked blocks are computed",
        "functional.attention.masks:Causal.key_range",
        lambda key_range: lambda self, start, stop, length: (0, length),
        f"{ATTENTION}::test_attention_does_not_compute_fully_masked_blocks",
    ),
    Bug(
        "positions of queries are assumed to start at 0",
        "functional.attention.tiles:key_ranges",
        takes(places=in_order),
        f"{ATTENTION}::test_attention_accepts_queries_at_any_positions",
    ),
    # ---- masks defined by the caller
    Bug(
        "a mask's causality is checked only up to position 512",
        "models.autoregressive:unsupported_reason",
        Replace("model.config.max_length", "min(model.config.max_length, 512)"),
        f"{OWN_MASK}::test_mask_is_checked_for_causality_at_all_positions",
    ),
    Bug(
        "a mask's causality is checked only near the diagonal",
        "models.autoregressive:forward_edge",
        Replace("range(max(row, low // block * block), high, block)", "(row,)"),
        f"{OWN_MASK}::test_noncausal_mask_is_detected_at_any_distance",
    ),
    Bug(
        "a mask inherits the key range of the mask whose rule it overrides",
        "functional.attention.masks:Mask.__init_subclass__",
        gives(None),
        f"{OWN_CLASSES}::test_mask_subclass_sets_visibility_in_every_attention_implementation "
        f"{OWN_CLASSES}::test_subclass_of_library_mask_inherits_no_bounds_on_visible_keys",
    ),
    Bug(
        "a user's mask gets indices instead of positions",
        "functional.tokens:Tokens._within_sequence",
        Replace("mask.needs_positions", "False"),
        f"{OWN_MASK}::test_nonzero_jacobian_entries_match_the_user_defined_mask "
        f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass",
    ),
    Bug(
        "cached attention uses the causal mask only",  # not a window, a prefix or a caller's mask
        "functional.tokens:Tokens.self_attention",
        causal_alone,
        f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass "
        f"{CHUNKING}::test_prefix_lm_with_prefix_in_first_chunk_equals_single_pass "
        f"{OWN_MASK}::test_cached_chunks_with_user_defined_mask_equal_one_pass",
    ),
    # ---- mask arrays with a head axis
    Bug(
        "a mask's head axis is read as a batch axis",  # the layout of torch and Flax
        "functional.attention.dot_product:_with_mask",
        Replace("mask.ndim == query.ndim > 2", "False"),
        f"{TABLES}::test_mask_array_may_have_a_head_axis",
    ),
)
