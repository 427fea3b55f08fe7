"""Bugs of the verification itself: blind witnesses and wrong rules."""

import jax.numpy as jnp

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, having, inside, takes, then, unchanged

COMPARED = "verify/test_dependency.py"
RULES = "verify/test_rules.py"
SUBJECT = "verify/test_subject.py"
PRECISION = "verify/test_precision.py"
CERTIFICATE = "verify/test_certificate.py"
AT_ITS_LAYER = f"{CERTIFICATE}::test_a_bug_fails_its_property_at_its_layer"

TWIN = "replace(model.config, dtype=dtype)"


def takes_nan_for_zero(largest):
    return lambda x, num_positions: largest(jnp.where(jnp.isnan(x), 0, x), num_positions)


def without_dilation(convolved):
    def broken(segments, kernel_size, dilation=1, causal=True):
        return convolved(segments, kernel_size, 1, causal)

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
        "a change to NaN is not counted",
        "verify.witnesses:_largest",
        takes_nan_for_zero,
        f"{COMPARED}::test_infinity_gets_past_a_zero",
    ),
    Bug(
        "derivatives are computed in batches, which a CPU's compiler gets wrong",
        "verify.witnesses:by_derivative.run",
        Replace("jax.lax.map(effect, rows)", "jax.lax.map(effect, rows, batch_size=16)"),
        "verify/test_real_lengths.py::test_derivatives_of_4096_rows_are_those_of_the_rule",
    ),
    Bug(
        "only one output feature is differentiated",
        "verify.witnesses:by_derivative.one_per_position",
        inside("jnp.cos", lambda _: lambda x: (x == 1).astype(jnp.float32)),
        f"{COMPARED}::test_every_feature_counts",
    ),
    Bug(
        "a tolerance for rounding removes paths of taint",
        "verify.dependency:dependency_matrix",
        Replace(
            'effect if witness == "taint" else np.where(effect <= atol, 0.0, effect)',
            "np.where(effect <= atol, 0.0, effect)",
        ),
        f"{COMPARED}::test_atol_removes_no_path_that_taint_finds",
    ),
    Bug(
        "small effects are ignored by default",
        "verify.dependency:dependency_matrix",
        Replace("effect <= atol", "effect <= max(atol, 1e-5)"),
        f"{COMPARED}::test_an_effect_above_atol_is_a_dependency",
    ),
    # ---- rules, and comparison with them
    Bug(
        "the convolution rule ignores dilation",
        "verify.rules:convolved",
        without_dilation,
        f"{RULES}::test_a_rule_is_its_drawing",
    ),
    Bug(
        "the composed rule omits a layer",
        "verify.rules:composed",
        without_the_first_layer,
        f"{RULES}::test_layers_of_a_window_reach_as_far_as_they_add_up_to",
    ),
    Bug(
        "missing edges are accepted",
        "verify.comparison:Comparison.holds",
        lambda holds: lambda self: not self.spurious,
        f"{COMPARED}::test_an_edge_that_is_not_there_is_missed",
    ),
    Bug(
        "a failure does not say that a rule is missing",
        "verify.comparison:assert_dependencies",
        Replace("(str(compared), *doubts)", "(str(compared),)"),
        f"{COMPARED}::test_a_failure_says_what_taint_has_no_rule_for",
    ),
    # ---- the certificate
    Bug(
        "a witness that disagrees is accepted",
        "verify.certificate:_rule",
        inside("sum", gives(0)),  # of the disagreements
        f"{CERTIFICATE}::test_a_blind_witness_is_told",
    ),
    Bug(
        "a leak is attributed to its last point",
        "verify.certificate:first_difference",
        from_the_end,
        AT_ITS_LAYER,
    ),
    Bug(
        "blocks are not checked one by one",
        "verify.certificate:_rule",
        inside("first_broken", gives(None)),
        AT_ITS_LAYER,
    ),
    Bug(
        "a chunking is compared with itself",
        "verify.certificate:_cached",
        Replace(
            "_, whole_cache = _read_in_chunks(subject, tokens, [length])",
            "whole, whole_cache = _read_in_chunks(subject, tokens, [length])",
        ),
        f"{CERTIFICATE}::test_every_chunking_is_held_to_one_pass",
    ),
    Bug(
        "a certificate splits a prefix into chunks",
        "verify.certificate:chunk_sizes",
        lambda chunks: lambda rng, length, first: chunks(rng, length, 1),
        f"{SUBJECT}::test_chunks_are_a_text_and_the_first_is_large_enough "
        f"{SUBJECT}::test_a_prefix_is_read_in_one_chunk",
    ),
    Bug(
        "the loss floor is measured on inputs, not targets",
        "verify.certificate:_floor",
        Replace("tokens[:, first:, None]", "tokens[:, first - 1 : -1, None]"),
        f"{CERTIFICATE}::test_who_has_seen_its_target_is_below_the_floor",
    ),
    Bug(
        "the loss floor includes tokens inside the prefix",
        "verify.certificate:_floor",
        takes(subject=having(minimum_prefill=1)),
        f"{SUBJECT}::test_nothing_is_lost_by_seeing_within_the_prefix",
    ),
    Bug(
        "a certificate omits its precision",
        "verify.certificate:examine",
        Replace('detail += f"; in {precision}"', "pass"),
        f"{PRECISION}::test_every_property_says_in_which_precision_it_was_found",
    ),
    # ---- the certified model
    Bug(
        "a bfloat16 model is certified in bfloat16",
        "verify.subject:subject_of",
        inside("replace", unchanged),  # the config keeps its dtype
        f"{PRECISION}::test_a_sound_bfloat16_model_is_as_exact_as_its_twin",
    ),
    Bug(
        "the certified model is of another class",
        "verify.subject:subject_of",
        takes(model=of_usual_class),
        f"{PRECISION}::test_a_cache_that_is_off_by_two_in_a_thousand_fails",
    ),
    Bug(
        "sizes missing in a config stay missing",
        "models.language_model:LanguageModel.__post_init__",
        inside("object.__setattr__", gives(None)),  # the resolved config is dropped
        f"{SUBJECT}::test_sizes_left_open_are_those_of_the_complete_config",
    ),
    Bug(
        "a certificate's sequences end with the prefix",
        "verify.subject:subject_of",
        takes(model=having(minimum_prefill=1)),
        f"{SUBJECT}::test_rows_are_longer_than_the_prefix",
    ),
    Bug(
        "verify always exits with status 0",
        "cli.verify:main",
        then(lambda status: 0),
        "cli/test_verbs.py::test_a_certificate_is_printed_written_and_drawn",
    ),
)
