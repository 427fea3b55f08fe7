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

        mask = mask if self.slots is None else Causal() & Packed()
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
    def broken(segments, cursor):
        documents, _, after = document_positions(segments, cursor)
        one = cursor._replace(segment=jnp.ones_like(cursor.segment))
        return documents, document_positions(jnp.minimum(segments, 1), one)[1], after

    return broken


OWN_CLASSES = "functional/test_own_classes.py"

BUGS = (
    # ---- masks: transformers#31673, #39408, #29623; keras#23038
    Bug(
        "causal mask sees one ahead",
        "functional.attention.masks:Causal.__call__",
        queries_stand(1),
        JACOBIAN,
    ),
    Bug(
        "causal mask hides the diagonal",
        "functional.attention.masks:Causal.__call__",
        queries_stand(-1),
        f"{DEPENDENCY}::test_without_the_residual_only_what_is_seen_counts",
    ),
    Bug(
        "window of W + 1",
        "functional.attention.masks:Window.__call__",
        of_one_more,
        PERTURBED,
    ),
    Bug(
        "window's range one short",
        "functional.attention.masks:Window.key_range",
        begins_late,
        f"{ONE_DOCUMENT} {ATTENTION}::test_a_row_in_order_needs_no_places",
    ),
    Bug(
        "scores are multiplied by the mask",
        "functional.attention.attend:attend",
        inside("jnp.where", lambda _: lambda visible, scores, low: scores * visible),
        FORMULA,
    ),
    Bug(
        "a block may look past the diagonal",
        "functional.attention.blockwise:_short_tiles",
        looks_everywhere,
        ONE_DOCUMENT,
    ),
    Bug(
        "leak by statistics over positions",  # nanochat#844
        "functional.layers.norms:rms_norm",
        inside("jnp.square", then(lambda squares: squares.mean(axis=-2, keepdims=True))),
        PERTURBED,
    ),
    Bug(
        "the prefix is causal",
        "functional.attention.masks:Prefix.__call__",
        lambda call: lambda self, query, key: call(replace(self, length=0), query, key),
        f"{JACOBIAN}[prefix-explicit-scan-none-float32]",
    ),
    # ---- packing and padding: maxtext#4476, transformers#46634; unsloth#3699; pytorch#103963
    Bug(
        "packed documents see each other",
        "functional.attention.masks:Packed.__call__",
        sees_all_but_padding,
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "positions do not restart in a packed row",
        "functional.positions:document_positions",
        numbers_on,
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "all batch elements get the positions of the first",  # unsloth#3699
        "functional.positions:document_positions",
        then(lambda x: (x[0], jnp.where(x[0] > 0, x[1][:1], 0), x[2])),
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass "
        f"{AUTOREGRESSIVE}::test_a_document_gives_what_it_gives_alone "
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "padding inside a document counts in positions",
        "functional.positions:document_positions",
        Replace(
            "jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid",
            "jnp.arange(valid.shape[1]) + jnp.zeros_like(segments)",
        ),
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "padding is not zeroed",
        "functional.embedding:without_padding",
        lambda without_padding: lambda x, segments: x,
        f"{INVARIANCE}::test_padding_reaches_nothing "
        f"{AUTOREGRESSIVE}::test_nan_in_padding_reaches_nothing "
        "properties/test_source.py::test_nan_in_the_padding_of_a_source_reaches_nothing "
        "models/test_encoder.py::test_nan_in_padding_reaches_nothing",
    ),
    Bug(
        "a fully masked query gives NaN",
        "functional.attention.formula:softmax",
        lambda _: lambda scores, sink=None: jax.nn.softmax(scores),
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    Bug(
        "blockwise: a fully masked query has weights in the gradient",
        "functional.attention.tiles:log_total_of",
        lambda log_total: lambda largest, total: largest + jnp.log(total),
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    # ---- mask arrays, and skipped blocks
    Bug(
        "a mask array's tile takes the wrong rows",
        "functional.attention.masks:DenseMask.tile",
        takes(rows=lambda rows: slice(0, rows.stop - rows.start)),
        f"{TABLES}::test_any_table_is_its_formula "
        f"{DEPENDENCY}::test_any_table_composes_and_the_residual_adds_the_diagonal",
    ),
    Bug(
        "fully masked blocks are computed",
        "functional.attention.masks:Causal.key_range",
        lambda key_range: lambda self, start, stop, length: (0, length),
        f"{ATTENTION}::test_ruled_out_blocks_cost_nothing",
    ),
    Bug(
        "queries are assumed to start at position 0",
        "functional.attention.tiles:key_ranges",
        takes(places=in_order),
        f"{ATTENTION}::test_queries_may_stand_anywhere",
    ),
    # ---- masks defined by the caller
    Bug(
        "a mask is checked for later tokens only up to position 512",
        "models.autoregressive:unsupported_reason",
        Replace("model.config.max_length", "min(model.config.max_length, 512)"),
        f"{OWN_MASK}::test_a_model_checks_all_its_positions",
    ),
    Bug(
        "a mask is checked only near the diagonal",
        "models.autoregressive:forward_edge",
        Replace("range(max(row, low // block * block), high, block)", "(row,)"),
        f"{OWN_MASK}::test_a_later_token_is_found_at_any_distance",
    ),
    Bug(
        "a mask inherits the key range of the mask whose rule it overrides",
        "functional.attention.masks:Mask.__init_subclass__",
        gives(None),
        f"{OWN_CLASSES}::test_a_subclass_of_a_mask_has_its_own_rule_in_every_implementation "
        f"{OWN_CLASSES}::test_a_subclass_of_a_mask_inherits_no_description_of_another_rule",
    ),
    Bug(
        "the caller's mask gets indices, not positions",
        "functional.tokens:Tokens._without_slots",
        Replace("mask.needs_positions", "False"),
        f"{OWN_MASK}::test_jacobian_is_the_callers_rule "
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "cached attention uses the causal mask only",  # not a window, a prefix or a caller's mask
        "functional.tokens:Tokens.self_attention",
        causal_alone,
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass "
        f"{CHUNKING}::test_a_prefix_read_in_one_chunk_is_one_pass "
        f"{OWN_MASK}::test_any_chunking_is_one_pass",
    ),
    # ---- mask arrays with a head axis
    Bug(
        "a mask's head axis is read as a batch axis",  # the layout of torch and Flax
        "functional.attention.dot_product:_with_mask",
        Replace("mask.ndim == query.ndim > 2", "False"),
        f"{TABLES}::test_a_table_may_have_an_axis_of_heads",
    ),
)
