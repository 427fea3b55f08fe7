"""What checks the models, wrong itself: a witness that is blind, a rule that is another."""

from tests.mutation.quoted import Bug

COMPARED = "verify/test_dependency.py"
SUBJECT = "verify/test_subject.py"
PRECISION = "verify/test_precision.py"
CERTIFICATE = "verify/test_certificate.py::test_a_bug_fails_its_property_at_its_layer"

BUGS = (
    # ---- the other witnesses
    Bug(
        "a change to NaN is none",
        "verify/witnesses.py",
        "jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)",
        "jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)",
        f"{COMPARED}::test_infinity_gets_past_a_zero",
    ),
    Bug(
        "one feature alone is asked for its derivative",
        "verify/witnesses.py",
        "y @ jnp.cos(jnp.arange(y.shape[-1]) + 1.0)",
        "y @ (jnp.arange(y.shape[-1]) == 0).astype(jnp.float32)",
        f"{COMPARED}::test_every_feature_counts",
    ),
    # ---- rules and what is compared with them
    Bug(
        "the rule of a convolution forgets its dilation",
        "verify/rules.py",
        "reach = [dilation * (k",
        "reach = [1 * (k",
        "verify/test_rules.py::test_a_rule_is_its_drawing",
    ),
    Bug(
        "layers are composed one short",
        "verify/rules.py",
        "    for seen in layers:\n",
        "    for seen in layers[1:]:\n",
        "verify/test_rules.py::test_layers_of_a_window_reach_as_far_as_they_add_up_to",
    ),
    Bug(
        "missing edges are forgiven",
        "verify/dependency.py",
        "return not self.missing and not self.spurious",
        "return not self.spurious",
        f"{COMPARED}::test_an_edge_that_is_not_there_is_missed",
    ),
    Bug(
        "a failure does not say that a rule is missing",
        "verify/dependency.py",
        "(str(compared), *found.remarks)",
        "(str(compared),)",
        f"{COMPARED}::test_a_failure_says_what_taint_has_no_rule_for",
    ),
    # ---- the certificate
    Bug(
        "who is wrong about a path is forgiven",
        "verify/certificate.py",
        "return compared.holds and not wrong,",
        "return compared.holds,",
        "verify/test_certificate.py::test_a_blind_witness_is_told",
    ),
    Bug(
        "a leak is put down to the last point that shows it",
        "verify/layers.py",
        "in zip(some, other, strict=True):",
        "in zip(some[::-1], other[::-1], strict=True):",
        CERTIFICATE,
    ),
    Bug(
        "blocks are not asked one by one",
        "verify/certificate.py",
        "    if broken:\n",
        "    if broken and not compared.holds:\n",
        CERTIFICATE,
    ),
    Bug(
        "a chunking is compared with itself",
        "verify/certificate.py",
        "whole = subject.compiled(tokens)\n    _, kept",
        "whole, kept",
        "verify/test_certificate.py::test_every_chunking_is_held_to_one_pass",
    ),
    Bug(
        "the loss floor is of the tokens that were read",
        "verify/certificate.py",
        "np.asarray(log_probs), tokens[:, first:, None]",
        "np.asarray(log_probs), tokens[:, first - 1 : -1, None]",
        "verify/test_certificate.py::test_who_has_seen_its_target_is_below_the_floor",
    ),
    Bug(
        "a bfloat16 model is certified with its rounding",
        "verify/subject.py",
        'replace(model.config.resolved, dtype="float32")',
        "model.config.resolved",
        f"{PRECISION}::test_a_sound_bfloat16_model_is_as_exact_as_its_twin",
    ),
    Bug(
        "what is certified is another class's model",
        "verify/subject.py",
        "model.copy(config=replace",
        "__import__('jaxformer').build(replace",
        f"{PRECISION}::test_a_cache_that_is_off_by_two_in_a_thousand_fails",
    ),
    Bug(
        "a certificate does not say that it is of float32",
        "verify/certificate.py",
        'detail += "; in float32"',
        "pass",
        f"{PRECISION}::test_every_property_says_in_which_precision_it_was_found",
    ),
    Bug(
        "a certificate reads sizes that are left open",
        "verify/subject.py",
        "replace(model.config.resolved, ",
        "replace(model.config, ",
        f"{SUBJECT}::test_sizes_left_open_are_those_of_the_complete_config",
    ),
    Bug(
        "a certificate cuts a prefix into chunks",
        "verify/certificate.py",
        "    sizes[0] = max(sizes[0], first)\n",
        "",
        f"{SUBJECT}::test_chunks_are_a_text_and_the_first_is_large_enough "
        f"{SUBJECT}::test_a_prefix_is_read_in_one_chunk",
    ),
    Bug(
        "a row of a certificate ends with its prefix",
        "verify/subject.py",
        "max(12, model.minimum_prefill + 1)",
        "12",
        f"{SUBJECT}::test_rows_are_longer_than_the_prefix",
    ),
    Bug(
        "the loss floor is of what a prefix sees",
        "verify/certificate.py",
        "rows, first = 32, subject.minimum_prefill",
        "rows, first = 32, 1",
        f"{SUBJECT}::test_nothing_is_lost_by_seeing_within_the_prefix",
    ),
    Bug(
        "verify ends well whatever it found",
        "cli/verify.py",
        "return 0 if holds else 1",
        "return 0",
        "cli/test_verbs.py",
    ),
)
