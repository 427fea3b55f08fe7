"""Masks, padding and packing: who may look at whom."""

from tests.mutation.quoted import (
    ATTENTION,
    ATTENTION_FILE,
    AUTOREGRESSIVE,
    BLOCKWISE,
    DECODER,
    DEPENDENCY,
    EMBEDDING,
    FORMULA,
    INVARIANCE,
    JACOBIAN,
    MASKS,
    ONE_DOCUMENT,
    OPTIONS,
    OWN_MASK,
    PERTURBED,
    POSITIONS,
    TABLES,
    Bug,
)

BUGS = (
    # ---- masks: transformers#31673, #39408, #29623; keras#23038
    Bug(
        "causal mask sees one ahead",
        MASKS,
        "        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        "        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None] + 1\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop + 1, length)",
        JACOBIAN,
    ),
    Bug(
        "causal mask hides the diagonal",
        MASKS,
        "        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        "        return key.position_ids()[..., None, :] < query.position_ids()[..., :, None]\n\n"
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        f"{DEPENDENCY}::test_without_the_residual_only_what_is_seen_counts",
    ),
    Bug(
        "window of W + 1",
        MASKS,
        "> query.position_ids()[..., :, None] - self.size",
        ">= query.position_ids()[..., :, None] - self.size",
        PERTURBED,
    ),
    Bug(
        "window's range one short",
        MASKS,
        "max(0, start - self.size + 1)",
        "max(0, start - self.size + 2)",
        f"{ONE_DOCUMENT} {ATTENTION}::test_a_row_in_order_needs_no_places",
    ),
    Bug(
        "window ignored by the cache",
        DECODER,
        "before, mask = cache.cursor.position, self_attention_mask(config, mask)",
        "before, mask = cache.cursor.position, Causal() & Packed()",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "mask dropped when the weights are wanted",
        ATTENTION_FILE,
        "    visible = mask(query_info, key_info)\n",
        "    visible = jnp.True_ if getattr(tap, 'capture', ()) else mask(query_info, key_info)\n",
        OPTIONS,
    ),
    Bug(
        "mask multiplied instead of put in place",
        ATTENTION_FILE,
        "    weights = _softmax(jnp.where(over_heads(visible), scores, -jnp.inf))\n\n    heads",
        "    weights = _softmax(scores * jnp.where(over_heads(visible), 1.0, 0.0))\n\n    heads",
        FORMULA,
    ),
    Bug(
        "a block may look past the diagonal",
        BLOCKWISE,
        "        if isinstance(visible, (np.ndarray, np.bool_)) and visible.all():",
        "        if isinstance(visible, (np.ndarray, np.bool_)):",
        ONE_DOCUMENT,
    ),
    Bug(
        "leak by statistics over positions",  # nanochat#844
        "functional/norms.py",
        "    mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)",
        "    mean_square = jnp.square(wide).mean(axis=(-1, -2), keepdims=True)",
        PERTURBED,
    ),
    Bug(
        "prefix seen by nobody before it",
        MASKS,
        "        return before | (key.position_ids()[..., None, :] < self.length)",
        "        return before",
        JACOBIAN,
    ),
    # ---- packing and padding: maxtext#4476, transformers#46634; unsloth#3699; pytorch#103963
    Bug(
        "packed documents see one another",
        MASKS,
        "        return same & (key.segments != 0)[..., None, :]",
        "        return (key.segments != 0)[..., None, :] & (query.segments != 0)[..., :, None]",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "positions do not restart in a packed row",
        POSITIONS,
        "    position = tokens_before - origin\n",
        "    position = tokens_before + cursor.position[:, None]\n",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "positions of the first row are taken for all",  # unsloth#3699
        POSITIONS,
        "    position = tokens_before - origin\n",
        "    position = jnp.broadcast_to((tokens_before - origin)[:1], segments.shape)\n",
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass {AUTOREGRESSIVE}::test_a_document_gives_what_it_gives_alone {INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "padding inside a document takes positions",
        POSITIONS,
        "    tokens_before = jnp.cumsum(valid, axis=1) - valid\n",
        "    tokens_before = jnp.arange(valid.shape[1]) + jnp.zeros_like(segments)\n",
        f"{INVARIANCE}::test_a_document_gives_what_it_gives_alone",
    ),
    Bug(
        "padding is not zeroed",
        EMBEDDING,
        "    return x if segments is None else jnp.where((segments != 0)[..., None], x, 0)",
        "    return x",
        f"{INVARIANCE}::test_padding_reaches_nothing "
        f"{AUTOREGRESSIVE}::test_nan_in_padding_reaches_nothing",
    ),
    Bug(
        "hidden values are not zeroed: 0 × NaN",
        ATTENTION_FILE,
        "        key, value = (jnp.where(known[..., None, :, None], x, 0) for x in (key, value))",
        "        pass",
        f"{ATTENTION}::test_nan_that_nobody_may_see_reaches_nothing",
    ),
    Bug(
        "a row that sees nothing is NaN",
        ATTENTION_FILE,
        "    powers = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))",
        "    powers = jnp.exp(scores - largest)",
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    Bug(
        "blockwise: a row that sees nothing has weights going back",
        BLOCKWISE,
        "jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))",
        "largest + jnp.log(total)",
        f"{ATTENTION}::test_who_sees_nothing_gets_zeros_and_finite_gradients",
    ),
    # ---- masks of another shape, and what is skipped
    Bug(
        "a table's tile is cut at the wrong rows",
        MASKS,
        "        return cut(cut(self.array, rows, -2), columns)",
        "        return cut(cut(self.array, slice(0, rows.stop - rows.start), -2), columns)",
        f"{TABLES}::test_any_table_is_its_formula "
        f"{DEPENDENCY}::test_any_table_composes_and_the_residual_adds_the_diagonal",
    ),
    Bug(
        "ruled-out blocks are computed all the same",
        MASKS,
        "    def key_range(self, start, stop, length):\n        return 0, min(stop, length)",
        "    def key_range(self, start, stop, length):\n        return 0, length",
        f"{ATTENTION}::test_ruled_out_blocks_cost_nothing",
    ),
    Bug(
        "queries are taken to stand at the start",
        "functional/blockwise.py",
        "    in_order = query_info.positions is None and key_info.positions is None\n",
        "    in_order = True\n",
        f"{ATTENTION}::test_queries_may_stand_anywhere",
    ),
    # ---- a mask of the caller's
    Bug(
        "the cache forgets the caller's mask",
        "models/autoregressive.py",
        '        options = {"segments": segments, **self.options}\n',
        '        options = {"segments": segments}\n',
        f"{OWN_MASK}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "the caller's mask is asked about places in the row",
        "functional/transformer.py",
        "positions if mask.needs_positions else None",
        "None",
        f"{OWN_MASK}::test_jacobian_is_the_callers_rule {AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    # ---- masks that are arrays
    Bug(
        "an axis of heads is taken for one of rows",  # the layout of torch and Flax
        "functional/attention.py",
        "np.ndim(mask) == query.ndim > 2",
        "False",
        f"{TABLES}::test_a_table_may_have_an_axis_of_heads",
    ),
)
