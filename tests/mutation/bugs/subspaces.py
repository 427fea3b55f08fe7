"""Bugs of neurons, circuits, autoencoders and subspaces: wrong sums, scales and rotations."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

NEURONS = "interpret/test_neurons.py"
UNITS = f"{NEURONS}::test_unit_attribution_equals_projected_unit_output"
CIRCUITS = "interpret/test_head_circuits.py"
COMPOSED = f"{CIRCUITS}::test_composition_scores_equal_norms_of_products_of_full_matrices"
TOKENS = f"{CIRCUITS}::test_token_circuits_equal_products_of_the_full_ov_and_qk_matrices"
HEADS = "interpret.linear_heads:_weights_of_layer"
AUTOENCODERS = "interpret/test_autoencoders.py"
FEATURES = f"{AUTOENCODERS}::test_autoencoder_features_and_reconstructions_equal_their_formulas"
LOAD = "interpret.autoencoders:load_autoencoder"
INTERCHANGE = "interpret/test_interchange.py"
ALIGNMENT = "interpret/test_alignment.py"
SWAPPED = f"{INTERCHANGE}::test_interchange_swaps_the_first_coordinates_of_the_rotated_values"
PATCHED = f"{INTERCHANGE}::test_interchange_patch_equals_patching_the_values_of_the_formula"
RECOVERED = f"{ALIGNMENT}::test_alignment_recovers_the_subspace_of_a_planted_variable"

BUGS = (
    # ---- neurons
    Bug(
        "the bias of a feed-forward layer is not attributed",
        "interpret.neurons:_attribute_neurons",
        Replace('"bias" in down', "False"),
        UNITS,
    ),
    Bug(
        "the activations of units are those of another position",
        "interpret.neurons:_attribute_neurons",
        Replace(
            "found.passed.captured[HIDDEN][:, :, read.position]",
            "found.passed.captured[HIDDEN][:, :, 0]",
        ),
        UNITS,
    ),
    Bug(
        "the derivative of a logit is that of another layer",
        "interpret.neurons:_attribute_neurons",
        Replace('found.slopes["feedforward"]', 'found.slopes["feedforward"][::-1]'),
        f"{UNITS}[sandwich]",
    ),
    Bug(
        "units with negative contributions are never among the largest",
        "interpret.neurons:NeuronAttribution.top",
        Replace("jnp.abs(flat)", "flat"),
        f"{NEURONS}::test_top_units_are_those_with_the_largest_absolute_contributions",
    ),
    # ---- circuits
    Bug(
        "a layer norm before a head does not subtract the mean",
        "interpret.linear_heads:norm_before",
        Replace("scaled - scaled.mean(axis=0)", "scaled"),
        f"{COMPOSED}[layer-norm]",
    ),
    Bug(
        "the gain of an RMS norm before a head is ignored",
        "interpret.linear_heads:norm_before",
        Replace("norm.gain(weights)[:, None] * kernel", "kernel"),
        f"{COMPOSED}[rotary]",
    ),
    Bug(
        "a layer norm after a head does not subtract the mean",
        "interpret.linear_heads:norm_after",
        Replace("x - x.mean(axis=-1, keepdims=True)", "x"),
        f"{COMPOSED}[output-norm]",
    ),
    Bug(
        "key composition reads the queries",
        "interpret.head_circuits:_composition",
        Replace("(key, query)", "(query, key)"),
        COMPOSED,
    ),
    Bug(
        "composition scores are not divided by the norm of the later circuit",
        "interpret.head_circuits:_composition",
        Replace("norms[first, 2][:, None] * norms[second][:, None]", "norms[first, 2][:, None]"),
        COMPOSED,
    ),
    Bug(
        "query heads of a circuit share key heads alternately",
        HEADS,
        Replace(
            "jnp.repeat(x, num_heads // num_kv_heads, axis=0)",
            "jnp.tile(x, (num_heads // num_kv_heads, 1, 1))",
        ),
        COMPOSED,
    ),
    Bug(
        "a circuit rotates the key instead of the query",
        HEADS,
        Replace(
            'query = _query_or_key(attention, own.get("query_norm", {}), query, distance)\n'
            'key = _query_or_key(attention, own.get("key_norm", {}), key, jnp.int32(0))',
            'query = _query_or_key(attention, own.get("query_norm", {}), query, jnp.int32(0))\n'
            'key = _query_or_key(attention, own.get("key_norm", {}), key, distance)',
        ),
        f"{TOKENS}[rotary] "
        f"{CIRCUITS}::test_token_circuits_predict_attention_and_logits_of_a_model_without_norms",
    ),
    Bug(
        "circuits of tokens omit the norm before the head",
        "interpret.head_circuits:_token_maps",
        Replace('norm_before(stack.final_norm, weights.get("final_norm", {}), kernel)', "kernel"),
        f"{TOKENS} {CIRCUITS}::test_copying_scores_equal_eigenvalues_of_the_full_ov_circuit",
    ),
    Bug(
        "circuits of a parallel layer use the norm named attention_norm",
        HEADS,
        Replace(
            'part.norm_name(attention) if isinstance(part, Parallel) else "attention_norm"',
            '"attention_norm"',
        ),
        f"{CIRCUITS}::test_composition_scores_do_not_depend_on_the_order_of_sublayers_that_share_a_norm",
    ),
    Bug(
        "circuits of a gated head are computed",
        "interpret.linear_heads:_nonlinear",
        Replace("attention.has_gate", "False"),
        f"{CIRCUITS}::test_circuits_refuse_models_whose_heads_are_not_linear",
    ),
    # ---- autoencoders
    Bug(
        "the threshold of a gated autoencoder ignores the bias of its magnitude",
        LOAD,
        Replace('encoder_bias - factor * arrays["b_gate"]', '-factor * arrays["b_gate"]'),
        FEATURES,
    ),
    Bug(
        "the magnitude of a gated autoencoder is not rescaled",
        LOAD,
        Replace("factor * encoder", "encoder"),
        FEATURES,
    ),
    Bug(
        "a TopK autoencoder keeps all features that equal the smallest of the k",
        "interpret.autoencoders:SparseAutoencoder.encode",
        Replace(
            "jnp.put_along_axis(zeros, index, largest, axis=-1, inplace=False)",
            "jnp.where(features >= largest[..., -1:], features, zeros)",
        ),
        f"{AUTOENCODERS}::test_topk_autoencoder_keeps_exactly_k_of_several_equal_features",
    ),
    Bug(
        "an autoencoder is spliced at the output of its layer, whatever its hook point",
        "interpret.autoencoders:splice",
        Replace(
            "points[0] if point is None else point",
            'point or "block.output"',
        ),
        f"{AUTOENCODERS}::test_autoencoders_are_spliced_at_their_own_hook_point",
    ),
    Bug(
        "hook_resid_pre is read as the output of its layer",
        "interpret.autoencoders:_POINTS",
        lambda points: {**points, "hook_resid_pre": "block.output"},
        f"{AUTOENCODERS}::test_hook_names_of_autoencoders_are_translated_to_layers_and_points",
    ),
    Bug(
        "options in the metadata of a config are not read",
        "interpret.autoencoders:_read_config",
        Replace("isinstance(metadata, dict)", "False"),
        f"{AUTOENCODERS}::test_hook_names_of_autoencoders_are_translated_to_layers_and_points "
        f"{AUTOENCODERS}::test_autoencoders_with_unsupported_options_are_refused",
    ),
    # ---- interchange interventions
    Bug(
        "the source is added to the base without removing the base's part",
        "interpret.interchange:interchange",
        Replace("source - value", "source"),
        f"{SWAPPED} {PATCHED} "
        f"{INTERCHANGE}::test_interchange_of_the_whole_space_has_the_effect_of_patch_sweep",
    ),
    Bug(
        "an interchange applies to all layers",
        "interpret.interchange:_interchange_at",
        Replace("at.layer == place.layer", "True"),
        f"{INTERCHANGE}::test_interchange_accuracy_is_the_fraction_of_predicted_answers",
    ),
    Bug(
        "the values of the first source position are copied to all positions",
        "interpret.interchange:_interchange_at",
        Replace("index[..., None]", "0 * index[..., None]"),
        PATCHED,
    ),
    Bug(
        "an interchange counts positions from the first token of a pass",
        "interpret.interchange:_interchange_at",
        Replace("jnp.asarray(at.positions)", "jnp.arange(x.shape[1], dtype=jnp.int32)"),
        f"{INTERCHANGE}::test_tokens_generated_with_an_interchange_equal_the_predictions_of_one_uncached_pass",
    ),
    Bug(
        "the intervention takes source values from another layer",
        "interpret.interchange:read_examples",
        Replace("layers_with(model, point).index(int(place.layer))", "0"),
        f"{INTERCHANGE}::test_interchange_accuracy_is_the_fraction_of_predicted_answers",
    ),
    Bug(
        "pairs that fill the last batch count in the accuracy",
        "interpret.interchange:measure_accuracy",
        Replace("np.concatenate(found)[:count]", "np.concatenate(found)"),
        f"{INTERCHANGE}::test_interchange_accuracy_is_the_fraction_of_predicted_answers",
    ),
    Bug(
        "a matrix whose rows are not orthonormal is accepted as a rotation",
        "interpret.interchange:_checked_rotation",
        Replace("not error < _TOLERANCE", "False"),
        f"{INTERCHANGE}::test_interchange_refuses_invalid_sites_pairs_and_rotations",
    ),
    # ---- alignment
    Bug(
        "the learnt rotation is not orthonormal",
        "interpret.alignment:_rotation",
        Replace("jnp.linalg.qr(free)[0].T", "free.T"),
        f"{ALIGNMENT}::test_alignment_rotation_is_an_orthonormal_basis {RECOVERED}",
    ),
    Bug(
        "the training of an alignment increases the loss",
        "interpret.alignment:_step",
        Replace("x - rate * update", "x + rate * update"),
        RECOVERED,
    ),
    Bug(
        "an alignment is tested on its training pairs",
        "interpret.alignment:_split",
        Replace("order[:number]", "order[-number:]"),
        f"{ALIGNMENT}::test_no_held_out_pair_is_used_for_training",
    ),
    Bug(
        "an alignment reports the accuracy of its first subspace",
        "interpret.alignment:train_alignment",
        Replace(
            '{"initial": first, "learnt": _rotation(state[0])}',
            '{"initial": first, "learnt": first}',
        ),
        RECOVERED,
    ),
)
