"""Bugs of the measurements of heads: wrong scores, wrong means and wrong errors."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, then, unchanged

SCORES = "interpret/test_head_scores.py"
ABLATION = "interpret/test_ablation.py"
ATLAS = "interpret/test_atlas.py"
GRADIENTS = "interpret/test_attribution.py"
PROBES = "interpret/test_probes.py"
NAMES = "interpret/test_token_names.py"
LOOPS = f"{SCORES}::test_scores_are_those_of_loops"
CROSS = f"{SCORES}::test_cross_scores_are_those_of_loops"
PATCH = f"{ABLATION}::test_each_head_is_that_of_a_patch"
MEAN = "interpret.ablation:_mean_outputs"
TARGETS = "interpret.head_scores:_targets"
NEXT = "interpret.texts:next_token_batch"

BUGS = (
    Bug(
        "maps of attention are numbered without the layers that have none",
        "interpret.layers:layers_with",
        then(lambda layers: list(range(len(layers)))),
        "interpret/test_attention_maps.py::test_maps_have_the_numbers_of_their_layers "
        "interpret/test_page.py::test_a_page_numbers_the_layers_that_have_attention",
    ),
    Bug(
        "a page keeps kernels of other classes than arrays",
        "functional.linear.affine:dense_all",
        unchanged,
        "interpret/test_kernels.py::test_a_page_holds_the_represented_arrays",
    ),
    # ---- scores
    Bug(
        "other documents count in scores",
        "interpret.head_scores:_same_document",
        Replace("documents[:, :, None] == documents[:, None, :]", "documents[:, None, :] != 0"),
        LOOPS,
    ),
    Bug(
        "weights at padding count in scores",
        "interpret.head_scores:score_sums",
        Replace("jnp.where(same, weights.astype(jnp.float32), 0.0)", "weights.astype(jnp.float32)"),
        LOOPS,
    ),
    Bug(
        "induction attends to the earlier copy itself",
        TARGETS,
        Replace("follows & earlier", "equal & earlier"),
        f"{LOOPS} {SCORES}::test_a_constructed_head_scores_exactly_one",
    ),
    Bug(
        "the first of a document follows the padding",
        TARGETS,
        Replace("(positions > 0)[:, None, :]", "True"),
        LOOPS,
    ),
    Bug(
        "a score is averaged over queries for which it is undefined",
        TARGETS,
        Replace("keys.duplicate_token.any(axis=-1)", "later"),
        LOOPS,
    ),
    Bug(
        "the first token of a document is the first of the row",
        TARGETS,
        Replace("(positions == 0)[:, None, :]", "(jnp.arange(tokens.shape[1]) == 0)[None, None]"),
        LOOPS,
    ),
    Bug(
        "delimiters after the query count in a decoder",
        TARGETS,
        Replace("settings.bidirectional", "True"),
        LOOPS,
    ),
    Bug(
        "the window is one token larger",
        TARGETS,
        Replace("abs(distance) <= settings.window", "abs(distance) <= settings.window + 1"),
        LOOPS,
    ),
    Bug(
        "pairs of two documents count as monotone",
        "interpret.head_scores:cross_score_sums",
        Replace("_same_document(documents)", "True"),
        CROSS,
    ),
    Bug(
        "equal source positions count as later",
        "interpret.head_scores:cross_score_sums",
        Replace(
            "weights.sum(axis=-1, keepdims=True) - before - weights",
            "weights.sum(axis=-1, keepdims=True) - before",
        ),
        CROSS,
    ),
    Bug(
        "the last token of a source is its padding",
        "interpret.head_scores:cross_score_sums",
        Replace("jnp.where(is_source, index, -1)", "jnp.where(is_source, index, index)"),
        CROSS,
    ),
    # ---- ablation
    Bug(
        "padding counts in the mean of a head",
        MEAN,
        Replace("queries.segments != 0", "real"),
        PATCH,
    ),
    Bug(
        "copied rows count in the results",
        "interpret.texts:map_rows",
        Replace("x.reshape(-1, *x.shape[2:])[:rows]", "x.reshape(-1, *x.shape[2:])"),
        PATCH,
    ),
    Bug(
        "a head is replaced by zero and not by its mean",
        "interpret.ablation:_ablate",
        Replace(
            "means = _mean_outputs(model, params, batch, attention, rows_at_once)",
            "means = 0 * _mean_outputs(model, params, batch, attention, rows_at_once)",
        ),
        PATCH,
    ),
    Bug(
        "the standard error divides by n and not n − 1",
        "interpret.ablation:_ablate",
        Replace("differences.std(axis=-1, ddof=1)", "differences.std(axis=-1)"),
        f"{ABLATION}::test_standard_errors_are_those_of_numpy",
    ),
    Bug(
        "only the first head of a set is ablated",
        "interpret.ablation:_ablate",
        Replace(
            "jax.lax.map(without, sets)", "jax.lax.map(without, sets & (sets.cumsum(-1) == 1))"
        ),
        f"{ABLATION}::test_a_set_is_one_patch_of_all_its_heads",
    ),
    Bug(
        "a prefix and the first token of a document are scored",
        NEXT,
        Replace("model.minimum_prefill", "0"),
        f"{ABLATION}::test_a_prefix_is_not_predicted "
        f"{ABLATION}::test_next_token_targets_are_those_of_loops",
    ),
    Bug(
        "a model without heads is measured",
        "interpret.layers:heads_shape",
        gives((2, 4)),
        f"{ABLATION}::test_wrong_arguments_are_named",
    ),
    # ---- the atlas
    Bug(
        "an encoder of a source is scored as a decoder",
        "interpret.atlas:_score_settings",
        Replace('settings.attention.startswith("encoder.")', "False"),
        f"{ATLAS}::test_an_encoder_decoder_has_an_atlas_of_each_attention",
    ),
    Bug(
        "undefined scores come first in the table",
        "interpret.atlas:HeadAtlas.table",
        Replace("-np.inf", "np.inf"),
        f"{ATLAS}::test_the_table_is_sorted",
    ),
    Bug(
        "all checkpoints are read at once",
        "interpret.atlas:atlas_over_checkpoints",
        Replace("checkpoints", "list(checkpoints)"),
        f"{ATLAS}::test_the_history_has_the_scores_of_each_checkpoint",
    ),
    Bug(
        "the newest checkpoint is read for every step",
        "artifacts.checkpoint:Checkpoints.read",
        Replace("str(step)", "str(max(self.steps()))"),
        f"{ATLAS}::test_checkpoints_of_a_run_are_read_one_at_a_time",
    ),
    # ---- names of tokens
    Bug(
        "tokens with the same text have the same name",
        "interpret.encoded_text:token_names",
        Replace("uses[text] == 1", "uses[text]"),
        f"{NAMES}::test_different_tokens_have_different_names_without_invisible_characters",
    ),
    Bug(
        "the space before a word is not part of its name",
        "interpret.encoded_text:_context",
        gives([]),
        f"{NAMES}::test_the_space_before_a_word_is_part_of_its_name",
    ),
    Bug(
        "the name of a no-break space is invisible",
        "interpret.encoded_text:_with_glyph",
        unchanged,
        f"{NAMES}::test_different_tokens_have_different_names_without_invisible_characters",
    ),
    # ---- probes
    Bug(
        "tokens of a text are on both sides of the split",
        "interpret.probes:_trains",
        Replace("np.unique(groups, return_inverse=True)", "(groups, np.arange(len(groups)))"),
        f"{PROBES}::test_a_group_is_held_out_as_a_whole "
        f"{PROBES}::test_a_random_label_of_whole_groups_is_not_readable",
    ),
    # ---- gradients
    Bug(
        "the gradient is that of another position",
        "interpret.attribution:_gradients",
        Replace(
            "model.forward(weights, inputs, hooks=hooks).hidden[:, position, None]",
            "model.forward(weights, inputs, hooks=hooks).hidden[:, -1, None]",
        ),
        f"{GRADIENTS}::test_later_tokens_have_no_gradient",
    ),
    Bug(
        "the gradient by the source is left out",
        "interpret.attribution:_gradients",
        Replace("Patch(True, x)", 'Patch(name == "embedding", x)'),
        f"{GRADIENTS}::test_a_gradient_predicts_a_small_change_of_the_logit",
    ),
)
