"""Bugs of the verification itself: blind witnesses and wrong rules."""

import jax.numpy as jnp

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, having, inside, takes, then, unchanged

COMPARED = "verify/test_dependency.py"
RULES = "verify/test_rules.py"
SUBJECT = "verify/test_certified_model.py"
PRECISION = "verify/test_precision.py"
CERTIFICATE = "verify/test_certificate.py"
AT_ITS_LAYER = f"{CERTIFICATE}::test_model_verification_names_the_property_and_layer_of_a_bug"

TWIN = "replace(model.config, dtype=dtype)"


def takes_nan_for_zero(largest):
    return lambda x, num_positions: largest(jnp.where(jnp.isnan(x), 0, x), num_positions)


def without_dilation(convolved):
    def broken(segment_ids, kernel_size, dilation=1):
        return convolved(segment_ids, kernel_size, 1)

    return broken


def without_the_first_layer(composed):
    return lambda layers, alive, residual=True: composed(layers[1:], alive, residual)


def from_the_end(first_difference):
    def broken(whole, part, index, tolerance):
        return first_difference(whole[::-1], part[::-1], index, tolerance)

    return broken


def of_usual_class(model):
    from jaxformer import build

    return build(model.config)


BUGS = (
    # ---- the other witnesses
    Bug(
        "a change to NaN does not count as an effect",
        "verify.witnesses:_largest",
        takes_nan_for_zero,
        f"{COMPARED}::test_zero_times_infinity_is_reported_as_a_dependency",
    ),
    Bug(
        "derivatives are computed in batches, which a CPU's compiler gets wrong",
        "verify.witnesses:by_derivative.run",
        Replace("jax.lax.map(effect, rows)", "jax.lax.map(effect, rows, batch_size=16)"),
        "verify/test_real_lengths.py::test_derivatives_at_default_verification_length_match_the_masks",
    ),
    Bug(
        "only one output feature is differentiated",
        "verify.witnesses:by_derivative.one_per_position",
        inside("jnp.cos", lambda _: lambda x: (x == 1).astype(jnp.float32)),
        f"{COMPARED}::test_dependency_through_a_single_feature_is_found_by_each_analysis",
    ),
    Bug(
        "atol removes paths that taint analysis found",
        "verify.dependency:dependency_matrix",
        Replace(
            'effect if witness == "taint" else np.where(effect <= atol, 0.0, effect)',
            "np.where(effect <= atol, 0.0, effect)",
        ),
        f"{COMPARED}::test_atol_does_not_affect_taint_analysis",
    ),
    Bug(
        "small effects are ignored by default",
        "verify.dependency:dependency_matrix",
        Replace("effect <= atol", "effect <= max(atol, 1e-5)"),
        f"{COMPARED}::test_only_effects_larger_than_atol_are_reported_as_dependencies",
    ),
    # ---- rules, and comparison with them
    Bug(
        "the convolution rule ignores dilation",
        "verify.rules:convolved",
        without_dilation,
        f"{RULES}::test_computed_dependency_tables_equal_hand_drawn_tables",
    ),
    Bug(
        "the composed rule omits a layer",
        "verify.rules:composed",
        without_the_first_layer,
        f"{RULES}::test_windows_of_several_layers_equal_one_window_of_their_combined_range",
    ),
    Bug(
        "missing dependencies are accepted",
        "verify.comparison:Comparison.holds",
        lambda holds: lambda self: not self.spurious,
        f"{COMPARED}::test_assertion_lists_expected_dependencies_that_a_function_lacks",
    ),
    Bug(
        "an assertion message omits primitives without a taint rule",
        "verify.comparison:assert_dependencies",
        Replace("(str(compared), *doubts)", "(str(compared),)"),
        f"{COMPARED}::test_assertion_message_lists_primitives_unknown_to_taint_analysis",
    ),
    # ---- the certificate
    Bug(
        "a method that disagrees is accepted",
        "verify.certificate:_rule",
        inside("sum", gives(0)),  # the number of disagreements
        f"{CERTIFICATE}::test_model_verification_reports_an_analysis_that_misses_dependencies",
    ),
    Bug(
        "a leak is attributed to the last hook point",
        "verify.certificate:first_difference",
        from_the_end,
        AT_ITS_LAYER,
    ),
    Bug(
        "blocks are not checked one by one",
        "verify.certificate:_rule",
        inside("first_failing_layer", gives(None)),
        AT_ITS_LAYER,
    ),
    Bug(
        "cached logits are compared with cached logits",
        "verify.certificate:_cached",
        Replace(
            "_, whole_cache = _read_in_chunks(subject, tokens, [length])",
            "whole, whole_cache = _read_in_chunks(subject, tokens, [length])",
        ),
        f"{CERTIFICATE}::test_model_verification_detects_cache_error_common_to_all_chunk_sizes",
    ),
    Bug(
        "a certificate splits a prefix into chunks",
        "verify.certificate:chunk_sizes",
        lambda chunks: lambda rng, length, first: chunks(rng, length, 1),
        f"{SUBJECT}::test_chunk_sizes_sum_to_length_and_first_chunk_has_at_least_given_size "
        f"{SUBJECT}::test_verification_processes_the_whole_prefix_in_one_cached_chunk",
    ),
    Bug(
        "the loss floor is measured on inputs, not targets",
        "verify.certificate:_floor",
        Replace("tokens[:, first:, None]", "tokens[:, first - 1 : -1, None]"),
        f"{CERTIFICATE}::test_model_verification_rejects_a_model_that_sees_its_targets",
    ),
    Bug(
        "the loss floor includes tokens inside the prefix",
        "verify.certificate:_floor",
        takes(subject=having(minimum_prefill=1)),
        f"{SUBJECT}::test_model_verification_does_not_check_the_loss_floor_on_targets_within_the_prefix",
    ),
    Bug(
        "a certificate omits the dtype of its checks",
        "verify.certificate:check_property",
        Replace('detail += f"; in {precision}"', "pass"),
        f"{PRECISION}::test_model_verification_states_the_dtype_of_each_check",
    ),
    # ---- the certified model
    Bug(
        "a bfloat16 model is certified in bfloat16",
        "verify.certified_model:certified_model",
        inside("replace", unchanged),  # the config keeps its dtype
        f"{PRECISION}::test_verification_of_bfloat16_model_equals_that_of_float32_model",
    ),
    Bug(
        "the certified model is of another class",
        "verify.certified_model:certified_model",
        takes(model=of_usual_class),
        f"{PRECISION}::test_model_verification_detects_an_error_of_2_per_mille_in_cached_logits",
    ),
    Bug(
        "sizes missing in a config stay missing",
        "models.language_model:LanguageModel.__post_init__",
        inside("object.__setattr__", gives(None)),  # the resolved config is dropped
        f"{SUBJECT}::test_certified_model_resolves_unset_config_sizes",
    ),
    Bug(
        "a certificate's sequences end with the prefix",
        "verify.certified_model:certified_model",
        takes(model=having(minimum_prefill=1)),
        f"{SUBJECT}::test_verification_sequences_are_longer_than_the_prefix",
    ),
    Bug(
        "verify always exits with status 0",
        "cli.verify:main",
        then(lambda status: 0),
        "cli/test_verbs.py::test_verify_prints_and_stores_which_properties_hold",
    ),
)
