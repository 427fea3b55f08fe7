"""The arithmetic of attention, written out and block by block."""

from tests.mutation.quoted import (
    ATTENTION,
    ATTENTION_FILE,
    BLOCKWISE,
    FORMULA,
    INVARIANCE,
    LONG_ROWS,
    Bug,
)

BUGS = (
    # ---- attention's own arithmetic
    Bug(
        "grouped heads tiled, not repeated",  # axlearn#842
        "functional/heads.py",
        "    return query.reshape(*batch, num_kv_heads, heads // num_kv_heads, length, head_dim)",
        "    return query.reshape(*batch, heads // num_kv_heads, num_kv_heads, length, head_dim)"
        ".swapaxes(-3, -4)",
        FORMULA,
    ),
    Bug(
        "blockwise: the softmax's D is left out of the gradient",
        BLOCKWISE,
        "(d_weights - products[..., None]) * scale",
        "d_weights * scale",
        f"{FORMULA} {INVARIANCE}::test_how_a_model_runs_changes_nothing",
    ),
    Bug(
        "blockwise: the last block of keys gets no gradient",
        BLOCKWISE,
        "        d_key = d_key.at[..., columns, :].add(",
        "        d_key = d_key.at[..., columns, :].set(",
        f"{FORMULA} {ATTENTION}::test_real_block_sizes_are_the_formula",
    ),
    # ---- long rows, in a loop over tiles
    Bug(
        "blockwise: a larger score does not scale down what was summed before",
        BLOCKWISE,
        "        output = output * kept + _weighted(",
        "        output = output + _weighted(",
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula",
    ),
    Bug(
        "blockwise: the last tile of a ragged row counts keys again",
        BLOCKWISE,
        "            visible = visible & rows[:, None] & columns\n",
        "            visible = visible & rows[:, None]\n",
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula "
        f"{LONG_ROWS}::test_packed_documents_are_their_formula",
    ),
    Bug(
        "blockwise: the last tile of a ragged row counts queries again",
        BLOCKWISE,
        "            visible = visible & rows[:, None] & columns\n",
        "            visible = visible & columns\n",
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula",
    ),
    Bug(
        "blockwise: tiles in which no one is seen are computed",
        BLOCKWISE,
        "        if depends_on_arrays and visible is not None:\n",
        "        if False:\n",
        f"{LONG_ROWS}::test_a_tile_in_which_no_one_is_seen_is_not_computed",
    ),
    Bug(
        "blockwise: every row is taken to be short",
        BLOCKWISE,
        "    return all(\n        (rows.stop - rows.start)",
        "    return any(\n        (rows.stop - rows.start) * 0",
        f"{LONG_ROWS}::test_no_array_is_larger_than_a_tile_or_a_row "
        f"{LONG_ROWS}::test_memory_of_the_compiled_program_is_linear",
    ),
    Bug(
        "softmax in bfloat16",  # optax#1020
        ATTENTION_FILE,
        '        "...kgqd,...ksd->...kgqs", grouped, key, preferred_element_type=jnp.float32\n',
        '        "...kgqd,...ksd->...kgqs", grouped, key\n',
        f"{ATTENTION}::test_bfloat16_scores_and_softmax_are_float32",
    ),
    Bug(
        "the softmax counts its axis from the left",
        ATTENTION_FILE,
        "    total = powers.sum(axis=-1, keepdims=True)\n",
        "    total = powers.sum(axis=4, keepdims=True)\n",
        f"{ATTENTION}::test_one_sequence_a_batch_and_vmap_agree",
    ),
)
