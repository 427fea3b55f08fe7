"""Bugs of the measurements of heads: wrong scores, wrong means and wrong errors."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, then, unchanged

SCORES = "interpret/test_scores.py"
ABLATION = "interpret/test_ablation.py"
ATLAS = "interpret/test_atlas.py"
LAYERS = "interpret/test_layers.py"
GRADIENTS = "interpret/test_attribution.py"
PROBES = "interpret/test_probes.py"
NAMES = "interpret/test_token_names.py"
PAGE_TOKENS = "interpret/test_page_tokenizer.py"
PAGE_SOURCE = "interpret/test_page_source_field.py"
LOOPS = f"{SCORES}::test_head_scores_equal_explicit_loops_over_queries_and_keys"
CROSS = f"{SCORES}::test_cross_attention_scores_equal_explicit_loops_over_positions"
PATCH = f"{ABLATION}::test_ablating_a_head_equals_patching_it_with_its_mean_output"
MEAN = "interpret.ablation:_mean_outputs"
TARGETS = "interpret.scores:_targets"
NEXT = "interpret.texts:next_token_batch"

BUGS = (
    Bug(
        "attention weights are numbered without the layers that lack attention",
        "interpret.layers:layers_with",
        then(lambda layers: list(range(len(layers)))),
        "interpret/test_attention.py::test_attention_weights_have_the_layer_numbers_of_the_model "
        "interpret/test_page.py::test_attention_on_explain_page_has_the_layer_numbers_of_the_model",
    ),
    Bug(
        "a page keeps kernels of other classes than arrays",
        "functional.linear.affine:dense_all",
        unchanged,
        "interpret/test_kernels.py::test_explain_page_of_lora_or_int8_model_equals_that_of_dense_weights",
    ),
    Bug(
        "a page lacks the keys of 5 bytes of a character map",
        "interpret.page_charsmap:_shortest_keys",
        Replace("len(key) == _LONGEST - 1", "len(key) == _LONGEST - 2"),
        f"{PAGE_TOKENS}::test_page_replaces_characters_like_the_precompiled_normalizer_of_the_library",
    ),
    Bug(
        "a page ignores a damaged node of a character map",
        "interpret.page_charsmap:characters_step",
        Replace("(IndexError, ValueError)", "ValueError"),
        f"{PAGE_TOKENS}::test_damaged_character_map_of_a_tokenizer_is_rejected",
    ),
    Bug(
        "a page limits the source of an encoder-decoder to the length of a target",
        "interpret.page_tokenizer:tokenizer_data",
        Replace("config.longest_source", "config.max_length"),
        f"{PAGE_SOURCE}::test_error_for_too_long_source_text_on_the_page_states_the_limit",
    ),
    Bug(
        "a page encodes a source without the tokens before and after it",
        "interpret.page_tokenizer:tokenizer_data",
        Replace("(list(tokenizer.before), list(tokenizer.after))", "([], [])"),
        f"{PAGE_SOURCE}::test_typed_source_gives_the_token_ids_of_python_and_the_logits_of_jax",
    ),
    # ---- scores
    Bug(
        "other documents count in scores",
        "interpret.scores:_same_document",
        Replace("documents[:, :, None] == documents[:, None, :]", "documents[:, None, :] != 0"),
        LOOPS,
    ),
    Bug(
        "weights at padding count in scores",
        "interpret.scores:score_sums",
        Replace("jnp.where(same, weights.astype(jnp.float32), 0.0)", "weights.astype(jnp.float32)"),
        LOOPS,
    ),
    Bug(
        "induction attends to the earlier copy itself",
        TARGETS,
        Replace("follows & earlier", "equal & earlier"),
        f"{LOOPS} {SCORES}::test_pattern_score_is_1_for_a_head_that_follows_the_pattern_exactly",
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
        "the first token of a document is the first of the sequence",
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
        "interpret.scores:cross_score_sums",
        Replace("_same_document(documents)", "True"),
        CROSS,
    ),
    Bug(
        "equal source positions count as later",
        "interpret.scores:cross_score_sums",
        Replace(
            "weights.sum(axis=-1, keepdims=True) - before - weights",
            "weights.sum(axis=-1, keepdims=True) - before",
        ),
        CROSS,
    ),
    Bug(
        "the last token of a source is its padding",
        "interpret.scores:cross_score_sums",
        Replace("jnp.where(is_source, index, -1)", "jnp.where(is_source, index, index)"),
        CROSS,
    ),
    # ---- ablation
    Bug(
        "padding counts in the mean of a head",
        MEAN,
        Replace("queries.segment_ids != 0", "real"),
        PATCH,
    ),
    Bug(
        "padding sequences of a batch count in the results",
        "interpret.texts:map_sequences",
        Replace("x.reshape(-1, *x.shape[2:])[:batch_size]", "x.reshape(-1, *x.shape[2:])"),
        PATCH,
    ),
    Bug(
        "a head is replaced by zero and not by its mean",
        "interpret.ablation:_ablate",
        Replace(
            "means = _mean_outputs(model, params, batch, attention, batch_size_within_memory)",
            "means = 0 * _mean_outputs(model, params, batch, attention, batch_size_within_memory)",
        ),
        PATCH,
    ),
    Bug(
        "the standard error divides by n and not n − 1",
        "interpret.ablation:_ablate",
        Replace("differences.std(axis=-1, ddof=1)", "differences.std(axis=-1)"),
        f"{ABLATION}::test_standard_errors_of_ablation_equal_numpy",
    ),
    Bug(
        "only the first head of a set is ablated",
        "interpret.ablation:_ablate",
        Replace(
            "jax.lax.map(without, sets)", "jax.lax.map(without, sets & (sets.cumsum(-1) == 1))"
        ),
        f"{ABLATION}::test_ablating_a_set_of_heads_equals_patching_them_with_their_means",
    ),
    Bug(
        "a prefix and the first token of a document are scored",
        NEXT,
        Replace("model.minimum_prefill", "0"),
        f"{ABLATION}::test_next_token_targets_exclude_the_prefix "
        f"{ABLATION}::test_next_token_targets_equal_those_of_a_python_loop",
    ),
    Bug(
        "a model without heads is measured",
        "interpret.layers:heads_shape",
        gives((2, 4)),
        f"{ABLATION}::test_error_of_ablating_sets_of_heads_names_the_invalid_argument",
    ),
    Bug(
        "path patching accepts layers without attention",
        "interpret.graph:check_is_sum",
        inside("heads_shape", gives(None)),
        f"{LAYERS}::test_error_of_interpret_functions_states_what_a_custom_layer_lacks",
    ),
    Bug(
        "heads are measured in layers with other numbers of heads",
        "interpret.layers:heads_shape",
        Replace("number != max(numbers)", "not number"),
        f"{LAYERS}::test_error_of_interpret_functions_states_what_a_custom_layer_lacks",
    ),
    Bug(
        "a lens accepts layers without a residual stream",
        "interpret.lens:check_stream",
        gives(None),
        f"{LAYERS}::test_error_of_interpret_functions_states_what_a_custom_layer_lacks",
    ),
    # ---- the atlas
    Bug(
        "an encoder of a source is scored as a decoder",
        "interpret.atlas:_score_settings",
        Replace('settings.attention.startswith("encoder.")', "False"),
        f"{ATLAS}::test_head_scores_cover_cross_attention_and_encoder_attention",
    ),
    Bug(
        "undefined scores come first in the sorted table",
        "interpret.atlas:HeadAtlas.table",
        Replace("-np.inf", "np.inf"),
        f"{ATLAS}::test_table_of_head_scores_is_sorted_by_the_chosen_column",
    ),
    Bug(
        "all checkpoints are read at once",
        "interpret.atlas:atlas_over_checkpoints",
        Replace("checkpoints", "list(checkpoints)"),
        f"{ATLAS}::test_head_scores_over_training_include_every_checkpoint",
    ),
    Bug(
        "the newest checkpoint is read for every step",
        "artifacts.checkpoint:Checkpoints.read",
        Replace("str(step)", "str(max(self.steps()))"),
        f"{ATLAS}::test_read_checkpoints_loads_one_training_step_at_a_time",
    ),
    # ---- names of tokens
    Bug(
        "tokens with the same text have the same label",
        "interpret.encoded_text:token_names",
        Replace("uses[text] == 1", "uses[text]"),
        f"{NAMES}::test_token_labels_are_unique_and_visible",
    ),
    Bug(
        "the space before a word is not part of the token's label",
        "interpret.encoded_text:_context",
        gives([]),
        f"{NAMES}::test_token_labels_show_leading_spaces",
    ),
    Bug(
        "the label of a no-break space is invisible",
        "interpret.encoded_text:_with_glyph",
        unchanged,
        f"{NAMES}::test_token_labels_are_unique_and_visible",
    ),
    # ---- probes
    Bug(
        "tokens of a text are on both sides of the split",
        "interpret.probes:_trains",
        Replace("np.unique(groups, return_inverse=True)", "(groups, np.arange(len(groups)))"),
        f"{PROBES}::test_all_probe_examples_of_a_group_are_in_the_same_split "
        f"{PROBES}::test_probes_fail_on_random_labels_if_whole_texts_are_held_out",
    ),
    # ---- gradients
    Bug(
        "the gradient is that of another position",
        "interpret.attribution:_gradients",
        Replace(
            "model.forward(weights, inputs, hooks=hooks).hidden[:, position, None]",
            "model.forward(weights, inputs, hooks=hooks).hidden[:, -1, None]",
        ),
        f"{GRADIENTS}::test_input_gradient_is_zero_for_tokens_after_the_prediction",
    ),
    Bug(
        "the gradient with respect to the source is omitted",
        "interpret.attribution:_gradients",
        Replace("Patch(True, x)", 'Patch(name == "embedding", x)'),
        f"{GRADIENTS}::test_gradient_attributions_predict_small_changes_of_the_logit",
    ),
    Bug(
        "the cost of compiling a sweep is ignored",
        "interpret.sweep:choose_starts",
        Replace("2 * starts * compilation", "0.0"),
        "interpret/test_sweep.py::test_patch_sweep_skips_tokens_before_the_patch_only_in_large_models",
    ),
)
