"""The arithmetic of attention, written out and block by block."""

from tests.mutation.bug import ATTENTION, FORMULA, INVARIANCE, LONG_ROWS, Bug
from tests.mutation.changes import Replace, gives


def tiled(group_heads):
    """Query head h shares key head h modulo their number, not the one of its neighbours."""

    def broken(query, num_kv_heads):
        return group_heads(query, query.shape[-3] // num_kv_heads).swapaxes(-3, -4)

    return broken


SCORES = '"...kgqd,...ksd->...kgqs", grouped, key'

BUGS = (
    # ---- attention's own arithmetic
    Bug(
        "grouped heads tiled, not repeated",  # axlearn#842
        "functional.heads:group_heads",
        tiled,
        FORMULA,
    ),
    Bug(
        "blockwise: the softmax's D is left out of the gradient",
        "functional.blockwise:_gradients",
        Replace("d_weights - products[..., None]", "d_weights"),
        f"{FORMULA} {INVARIANCE}::test_how_a_model_runs_changes_nothing",
    ),
    Bug(
        "blockwise: the last block of keys gets no gradient",
        "functional.blockwise:_short_backward",
        Replace(
            "d_key.at[..., columns, :].add(d_columns[0])",
            "d_key.at[..., columns, :].set(d_columns[0])",
        ),
        f"{FORMULA} {ATTENTION}::test_real_block_sizes_are_the_formula",
    ),
    # ---- long rows, in a loop over tiles
    Bug(
        "blockwise: a larger score does not scale down what was summed before",
        "functional.blockwise:_long_forward.add",
        Replace("output * kept", "output"),
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula",
    ),
    Bug(
        "blockwise: the last tile of a ragged row counts keys again",
        "functional.blockwise:_over_tiles.step",
        Replace("visible & rows[:, None] & columns", "visible & rows[:, None]"),
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula "
        f"{LONG_ROWS}::test_packed_documents_are_their_formula",
    ),
    Bug(
        "blockwise: the last tile of a ragged row counts queries again",
        "functional.blockwise:_over_tiles.step",
        Replace("visible & rows[:, None] & columns", "visible & columns"),
        f"{LONG_ROWS}::test_a_row_in_order_is_its_formula",
    ),
    Bug(
        "blockwise: tiles in which no one is seen are computed",
        "functional.blockwise:_over_tiles.step",
        Replace("depends_on_arrays and visible is not None", "False"),
        f"{LONG_ROWS}::test_a_tile_in_which_no_one_is_seen_is_not_computed",
    ),
    Bug(
        "blockwise: every row is taken to be short",
        "functional.blockwise:_is_short",
        gives(True),
        f"{LONG_ROWS}::test_no_array_is_larger_than_a_tile_or_a_row "
        f"{LONG_ROWS}::test_memory_of_the_compiled_program_is_linear",
    ),
    Bug(
        "softmax in bfloat16",  # optax#1020
        "functional.attention:explicit_attention",
        Replace(
            f"jnp.einsum({SCORES}, preferred_element_type=jnp.float32)", f"jnp.einsum({SCORES})"
        ),
        f"{ATTENTION}::test_bfloat16_scores_and_softmax_are_float32",
    ),
    Bug(
        "the softmax counts its axis from the left",
        "functional.attention:_softmax",
        Replace("powers.sum(axis=-1, keepdims=True)", "powers.sum(axis=4, keepdims=True)"),
        f"{ATTENTION}::test_one_sequence_a_batch_and_vmap_agree",
    ),
)
