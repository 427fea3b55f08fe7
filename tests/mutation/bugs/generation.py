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
    def broken(arrays, key, step, logits, rows=None):
        if arrays is not None:
            logits = logits / arrays.temperature
            arrays = arrays._replace(temperature=jnp.float32(1))
        return sample_tokens(arrays, key, step, logits, rows)

    return broken


BUGS = (
    # ---- sampling
    Bug(
        "draws depend on the batch size",
        "decoding.sampling:sample_tokens",
        inside("jnp.asarray", lambda asarray: lambda rows: asarray(rows) + len(rows)),
        f"{GENERATION}::test_a_row_depends_on_its_key_and_not_on_its_neighbours",
    ),
    Bug(
        "a row draws with its number in its batch",
        "decoding.sampling:sample_tokens",
        inside("jnp.asarray", lambda _: lambda rows: jnp.arange(len(rows))),
        f"{GENERATION}::test_batches_return_what_one_batch_returns",
    ),
    Bug(
        "log-probabilities after temperature",
        "decoding.steps:_choose",
        Replace(
            "token_losses(logits, token)",
            "token_losses(logits / (choice.sampler.temperature if choice.sampler else 2.0), token)",
        ),
        f"{SCORE}::test_log_probs_add_up_to_scores",
    ),
    Bug(
        "top-p keeps one token too few",
        "decoding.sampling:_keep",
        Replace("order >= threshold[:, None]", "order > threshold[:, None]"),
        f"{SAMPLING}::test_what_is_kept_is_what_the_definition_keeps",
    ),
    Bug(
        "−0.0 sorts below 0.0",
        "decoding.sampling:_ordered",
        lambda ordered: lambda x: ordered(x) - jnp.signbit(x).astype(jnp.uint32),
        f"{SAMPLING}::test_the_two_zeros_are_one_number "
        f"{SAMPLING}::test_what_is_kept_is_what_the_definition_keeps",
    ),
    Bug(
        "top-k counts logits after the temperature",
        "decoding.sampling:sample_tokens",
        truncates_tempered,
        f"{SAMPLING}::test_top_k_looks_at_the_logits_whatever_the_temperature",
    ),
    Bug(
        "a temperature overflows to infinity",
        "decoding.sampling:Sampler.__post_init__",
        inside("_LARGEST", lambda _: sys.float_info.max),
        f"{SAMPLING}::test_a_temperature_that_float32_cannot_hold_is_refused",
    ),
    Bug(
        "a top-k beyond int32 overflows",
        "decoding.sampling:Sampler.arrays",
        inside("min", unchanged),
        f"{SAMPLING}::test_a_top_k_beyond_the_vocabulary_keeps_everything",
    ),
    Bug(
        "True is a temperature",
        "decoding.sampling:_number",
        inside("isinstance", gives(False)),  # of bool
        f"{SAMPLING}::test_what_is_no_number_or_out_of_range_is_refused_by_name",
    ),
    # ---- cached packed weights
    # ---- the loop
    Bug(
        "NaN logits become tokens",
        "decoding.generate:_continued",
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
        "draws ignore the step",
        "decoding.sampling:sample_tokens",
        takes(step=lambda step: 0 * step),
        f"{GENERATION}::test_row_i_step_t_draws_with_its_own_key_from_what_is_kept",
    ),
    Bug(
        "logits are multiplied by the temperature",
        "decoding.sampling:_tempered",
        by_the_inverse,
        f"{SAMPLING}::test_draws_have_the_frequencies_of_what_is_left",
    ),
    Bug(
        "the least probable token is the greedy one",
        "decoding.sampling:most_probable",
        lambda most_probable: lambda logits: most_probable(-logits),
        f"{AUTOREGRESSIVE}::test_a_ragged_batch_is_each_row_alone",
    ),
    Bug(
        "the stop token is not counted",
        "decoding.steps:_choose",
        omits_stop,
        f"{GENERATION}::test_a_stop_token_ends_its_row_and_is_counted",
    ),
    Bug(
        "every prompt length compiles again",
        "models.rows:power_of_two",
        lambda power_of_two: lambda length, smallest: max(length, smallest),
        f"{GENERATION}::test_compilations_are_few_and_never_repeated",
    ),
    Bug(
        "a prompt that leaves too little room is accepted",
        "decoding.generate:check_prompts",
        Replace("ids.size + max_new_tokens > config.max_length", "ids.size > config.max_length"),
        f"{GENERATION}::test_what_cannot_be_generated_is_refused_by_name",
    ),
    Bug(
        "decoding demands a fused kernel",
        "models.config.execution:Execution.for_decoding",
        Replace('self.attention == "fused"', "False"),
        "decoding/test_fused.py::test_fused_attention_decodes_as_explicit_attention_does",
    ),
    Bug(
        "log-probabilities are not normalized again",
        "decoding.constraints:constrain",
        Replace("constraints.renormalize_logits", "False"),
        "decoding/test_constraints.py::test_constraints_equal_loops_over_the_text",
    ),
    Bug(
        "score accepts any id",
        "decoding.autoregressive:complete_inputs",
        inside("check_tokens", gives(None)),
        f"{SCORE}::test_score_refuses_a_token_that_is_none",
    ),
)
