"""Bugs of the functions of the lecture notes, of the user's parts of a model, and of edits."""

import jax.numpy as jnp

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, takes

NOTES = "functional/test_notes.py"
OWN = "models/test_own_functions.py"
EDIT = "decoding/test_edit.py"

BUGS = (
    Bug(
        "a mask of 0 and 1 is inverted",
        "functional.attention.own_masks:as_booleans",
        Replace("mask != 0", "mask == 0"),
        f"{NOTES}::test_masks_of_zero_and_one_equal_boolean_masks",
    ),
    Bug(
        "a mask function may return numbers",
        "functional.attention.own_masks:FunctionMask.__call__",
        Replace("visible.dtype == bool", "True"),
        f"{NOTES}::test_mask_function_that_returns_no_booleans_of_all_pairs_is_rejected",
    ),
    Bug(
        "a mask function cannot be exported for all lengths",
        "functional.attention.own_masks:FunctionMask.__call__",
        Replace("jnp.broadcast_shapes", "np.broadcast_shapes"),
        "models/test_transforms.py"
        "::test_model_with_a_mask_function_exported_by_jax_accepts_all_lengths",
    ),
    Bug(
        "a mask function receives keys as queries",
        "functional.attention.own_masks:FunctionMask.__call__",
        Replace("self.allows(queries, keys)", "self.allows(keys, queries)"),
        f"{NOTES}::test_attention_with_a_function_as_mask_equals_attention_with_its_table",
    ),
    Bug(
        "the explicit formula ignores its scale",
        "functional.attention.formula:explicit_attention",
        Replace("query.shape[-1] ** -0.5 if scale is None else scale", "query.shape[-1] ** -0.5"),
        f"{NOTES}::test_attention_formula_equals_python_loops_and_every_attention_implementation",
    ),
    Bug(
        "cross-attention computes values from the queries' tokens",
        "functional.layers.multi_head:multi_head_attention",
        Replace("linear(weights[name], source)", "linear(weights[name], x)"),
        f"{NOTES}::test_multi_head_attention_to_a_source_equals_the_cross_attention_of_a_model",
    ),
    Bug(
        "each query head has its own key head",
        "functional.layers.multi_head:multi_head_attention",
        Replace("y.shape[-1] // head_dim", "num_heads"),
        f"{NOTES}::test_multi_head_attention_equals_the_attention_of_a_model",
    ),
    Bug(
        "the key/value cache begins with the new tokens",
        "functional.layers.multi_head:kv_cache",
        Replace("zip(cache, (key, value), strict=True)", "zip((key, value), cache, strict=True)"),
        f"{NOTES}::test_keys_and_values_appended_token_by_token_give_causal_attention",
    ),
    Bug(
        "post-norm lacks the residual connection",
        "functional.transformer:norm_after",
        Replace("norm(add_residual(function, x))", "norm(function(x))"),
        f"{NOTES}::test_residual_connections_and_norms_equal_their_formulas",
    ),
    Bug(
        "the block uses pre-norm for both positions of the norm",
        "functional.transformer:transformer_block",
        Replace("norm_before if norm_position == 'pre' else norm_after", "norm_before"),
        f"{NOTES}::test_transformer_block_equals_the_block_of_a_model",
    ),
    Bug(
        "the decoder function lacks the last norm",
        "functional.transformer:decoder",
        Replace("layer_norm(x, **weights['final_norm'])", "x"),
        f"{NOTES}::test_decoder_function_equals_the_decoder_model",
    ),
    Bug(
        "greedy decoding reads the logits of the new position",
        "functional.transformer:greedy_decode",
        Replace("t - 1", "t"),
        f"{NOTES}::test_greedy_decode_equals_generate_at_temperature_zero",
    ),
    Bug(
        "position vectors begin with the second one",
        "functional.position_vectors:encode_positions",
        Replace("jnp.arange(length, dtype=jnp.int32)", "1 + jnp.arange(length, dtype=jnp.int32)"),
        f"{NOTES}::test_position_vectors_may_be_an_array_or_a_function",
    ),
    Bug(
        "one step of a recurrent cell ignores the state",
        "functional.layers.recurrent:_gates",
        Replace("gates + linear(weights['state'], hidden, jnp.float32)", "gates"),
        f"{NOTES}::test_recurrent_functions_equal_steps_of_their_cell_in_float64",
    ),
    Bug(
        "a causal convolution reads the next token",
        "functional.layers.convolution:causal_offsets",
        Replace("k + 1 - kernel_size", "k + 2 - kernel_size"),
        f"{NOTES}::test_causal_convolution_equals_a_loop_in_float64",
    ),
    Bug(
        "an unknown argument is not named",
        "functional.arguments:check_names",
        lambda check: lambda *arguments: None,
        f"{NOTES}::test_error_for_unknown_argument_suggests_the_nearest_argument",
    ),
    # ---- the user's parts of a model
    Bug(
        "the table of a mask is transposed",
        "functional.attention.own_masks:TableMask.__call__",
        Replace(
            "table[rows[..., :, None], columns[..., None, :]]",
            "table.T[rows[..., :, None], columns[..., None, :]]",
        ),
        f"{OWN}::test_dependencies_of_a_model_equal_its_randomly_drawn_mask_array",
    ),
    Bug(
        "a table of a prefix may be read in chunks",
        "functional.attention.own_masks:TableMask.minimum_prefill",
        Replace("int(later[-1]) + 1 if len(later) else 1", "1"),
        f"{OWN}::test_model_with_mask_given_as_array_or_function_equals_model_with_mask_object",
    ),
    Bug(
        "a table shorter than max_length is accepted",
        "models.builders.own:check_own_mask",
        Replace("table.size < config.max_length", "False"),
        f"{OWN}::test_invalid_user_defined_mask_or_activation_or_positions_are_rejected",
    ),
    Bug(
        "the user's positions count the tokens before a packed document",
        "functional.position_vectors:FunctionPositions.add",
        takes(positions=lambda x: jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)),
        f"{OWN}::test_positions_given_as_array_or_function_equal_positions_given_by_name",
    ),
    Bug(
        "a ring buffer has no limit for positions that are an array",
        "decoding.loop_cache:_check_reading",
        Replace("not (positions and positions.is_table)", "model.config.positions != 'learned'"),
        f"{OWN}::test_positions_given_as_array_limit_the_text_length_but_positions_given_as_function_do_not",
    ),
    Bug(
        "the user's activation is ignored",
        "models.builders.transformers:_layer",
        Replace("own.activation or config.activation", "config.activation"),
        f"{OWN}::test_activation_given_as_function_equals_activation_given_by_name",
    ),
    Bug(
        "a saved model loses its activation and positions",
        "artifacts.saved:OWN",
        Replace("('mask', 'layers', 'activation', 'positions')", "('mask', 'layers')"),
        f"{OWN}::test_model_with_user_defined_arrays_and_functions_is_saved_and_loaded",
    ),
    # ---- edits
    Bug(
        "an edit changes all layers",
        "functional.hooks:Edit.changed",
        Replace("(self.layer == jnp.asarray(self.layers, jnp.int32)).any()", "True"),
        f"{EDIT}::test_edit_that_returns_an_array_equals_a_patch",
    ),
    Bug(
        "an edit changes all positions",
        "functional.hooks:Edit.changed",
        Replace("self.positions is not None", "False"),
        f"{EDIT}::test_edit_that_returns_an_array_equals_a_patch",
    ),
    Bug(
        "an edit changes every step of generation",
        "functional.hooks:HookPoints.at_steps",
        Replace("steps is None", "True"),
        f"{EDIT}::test_edit_at_a_generation_step_equals_a_patch_at_this_step",
    ),
    Bug(
        "the arrays of an edit are copied for each layer",
        "functional.stack:_stack_unless_shared",
        Replace("len(trees) > 1", "False"),
        f"{EDIT}::test_arrays_of_an_edit_are_not_copied_for_each_layer_of_a_scan",
    ),
    Bug(
        "the head before the ablated one is ablated",
        "functional.hooks:_Zeros.__call__",
        Replace("value.at[..., self.head, :, :]", "value.at[..., self.head - 1, :, :]"),
        f"{EDIT}::test_ablating_a_head_equals_zeroing_its_rows_of_the_output_kernel",
    ),
)
