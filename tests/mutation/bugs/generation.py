"""Bugs of sampling, of the decoding loop and of scores."""

import sys

import jax.numpy as jnp

from tests.mutation.bug import AUTOREGRESSIVE, GENERATION, NONFINITE, REAL_SIZES, Bug
from tests.mutation.changes import Replace, gives, inside, takes, then, unchanged

SAMPLING, SCORE = "decoding/test_sampling.py", "decoding/test_score.py"


def by_the_inverse(tempered):
    def broken(arrays, logits):
        return tempered(arrays._replace(temperature=1 / arrays.temperature), logits)

    return broken


def omits_stop(choose):
    def broken(logits, captured, before, choice):
        state, output = choose(logits, captured, before, choice)
        return state, output._replace(tokens=jnp.where(state.stopped, -1, output.tokens))

    return broken


def truncates_tempered(sample_tokens):
    def broken(arrays, key, step, logits, indices=None):
        if arrays is not None:
            logits = logits / arrays.temperature
            arrays = arrays._replace(temperature=jnp.float32(1))
        return sample_tokens(arrays, key, step, logits, indices)

    return broken


BUGS = (
    # ---- sampling
    Bug(
        "draws depend on the batch size",
        "decoding.sampling:sample_tokens",
        inside("jnp.asarray", lambda asarray: lambda indices: asarray(indices) + len(indices)),
        f"{GENERATION}::test_sampled_text_is_independent_of_other_prompts",
    ),
    Bug(
        "a sequence is sampled with its number in the batch",
        "decoding.sampling:sample_tokens",
        inside("jnp.asarray", lambda _: lambda indices: jnp.arange(len(indices))),
        f"{GENERATION}::test_generation_in_several_batches_equals_one_batch",
    ),
    Bug(
        "log-probabilities are computed after the temperature",
        "decoding.steps:_choose",
        Replace(
            "token_losses(logits, token)",
            "token_losses(logits / (choice.sampler.temperature if choice.sampler else 2.0), token)",
        ),
        f"{SCORE}::test_log_probabilities_of_generated_tokens_sum_to_the_score",
    ),
    Bug(
        "top-p keeps one token too few",
        "decoding.sampling:_keep",
        Replace("order >= threshold[:, None]", "order > threshold[:, None]"),
        f"{SAMPLING}::test_top_k_top_p_and_min_p_match_their_definitions",
    ),
    Bug(
        "−0.0 sorts below 0.0",
        "decoding.sampling:_to_ordered_uint",
        lambda ordered: lambda x: ordered(x) - jnp.signbit(x).astype(jnp.uint32),
        f"{SAMPLING}::test_top_k_top_p_and_min_p_treat_negative_zero_as_equal_to_zero "
        f"{SAMPLING}::test_top_k_top_p_and_min_p_match_their_definitions",
    ),
    Bug(
        "top-k counts logits after the temperature",
        "decoding.sampling:sample_tokens",
        truncates_tempered,
        f"{SAMPLING}::test_tokens_kept_by_top_k_do_not_depend_on_temperature",
    ),
    Bug(
        "a temperature overflows to infinity",
        "decoding.sampling:Sampler.__post_init__",
        inside("_LARGEST", lambda _: sys.float_info.max),
        f"{SAMPLING}::test_sampler_rejects_temperature_outside_float32_range",
    ),
    Bug(
        "a top-k beyond int32 overflows",
        "decoding.sampling:Sampler.arrays",
        inside("min", unchanged),
        f"{SAMPLING}::test_top_k_above_vocab_size_keeps_all_tokens",
    ),
    Bug(
        "True is accepted as a temperature",
        "decoding.sampling:_to_float",
        inside("isinstance", gives(False)),  # the check for bool
        f"{SAMPLING}::test_invalid_sampler_fields_are_rejected",
    ),
    # ---- the loop
    Bug(
        "NaN logits become tokens",
        "decoding.generate:_generate_batch",
        inside("check_finite_logits", gives(None)),
        NONFINITE,
    ),
    Bug(
        "a beam continues from NaN logits",
        "decoding.beam:_extend",
        inside("jnp.isnan", then(jnp.zeros_like)),
        NONFINITE,
    ),
    Bug(
        # XLA:CPU of jaxlib 0.10.2, similar to jax#39103.
        "packed kernels multiply thousands of rows in parts",
        "functional.linear.kernels:FEW_ROWS",
        lambda few: 100_000,
        REAL_SIZES,
    ),
    Bug(
        "sampling keys ignore the step",
        "decoding.sampling:sample_tokens",
        takes(step=lambda step: 0 * step),
        f"{GENERATION}::test_random_key_of_each_sampled_token_depends_on_prompt_and_step",
    ),
    Bug(
        "logits are multiplied by the temperature",
        "decoding.sampling:_divide_by_temperature",
        by_the_inverse,
        f"{SAMPLING}::test_sampled_frequencies_match_truncated_distribution",
    ),
    Bug(
        "the least probable token is the greedy one",
        "decoding.sampling:most_probable",
        lambda most_probable: lambda logits: most_probable(-logits),
        f"{AUTOREGRESSIVE}::test_prompts_of_different_lengths_generate_the_same_text_as_each_alone",
    ),
    Bug(
        "the stop token is not counted",
        "decoding.steps:_choose",
        omits_stop,
        f"{GENERATION}::test_generated_sequence_ends_with_its_first_stop_token",
    ),
    Bug(
        "every prompt length compiles again",
        "models.sequences:power_of_two",
        lambda power_of_two: lambda length, smallest: max(length, smallest),
        f"{GENERATION}::test_generate_compiles_few_programs_and_none_twice",
    ),
    Bug(
        "a prompt that leaves too little room is accepted",
        "decoding.generate:check_prompts",
        Replace("ids.size + max_new_tokens > config.max_length", "ids.size > config.max_length"),
        f"{GENERATION}::test_generate_rejects_invalid_arguments",
    ),
    Bug(
        "decoding demands a fused kernel",
        "models.config.execution:Execution.for_decoding",
        Replace('self.attention == "fused"', "False"),
        "decoding/test_fused.py::test_decoding_with_fused_attention_equals_decoding_with_unfused_attention",
    ),
    Bug(
        "log-probabilities are not normalized again",
        "decoding.constraints:constrain",
        Replace("rules.constraints.renormalize_logits", "False"),
        "decoding/test_constraints.py::test_decoding_constraints_change_scores_like_a_python_reference",
    ),
    Bug(
        "score accepts any id",
        "decoding.autoregressive:complete_inputs",
        inside("check_tokens", gives(None)),
        f"{SCORE}::test_score_rejects_ids_outside_the_vocabulary",
    ),
)
