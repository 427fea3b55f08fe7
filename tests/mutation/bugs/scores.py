"""Bugs of score modifiers and of settings that differ between layers."""

from dataclasses import replace

from tests.mutation.bug import AUTOREGRESSIVE, INVARIANCE, Bug
from tests.mutation.changes import Replace, inside, takes, unchanged

SCORES = "functional/attention/test_scores.py"
ENCODER = "models/test_encoder.py"


def takes_first_step(scan):
    def broken(stack, steps, x, weights, inputs):
        return scan(stack, dict.fromkeys(steps, steps[stack.layers[0]]), x, weights, inputs)

    return broken


BUGS = (
    Bug(
        "short sequences give the relative bias no gradient",
        "functional.attention.blockwise:_short_backward",
        inside("add_gradients", unchanged),
        f"{SCORES}::test_attention_with_softcap_and_position_bias_equals_formula",
    ),
    Bug(
        "long sequences give the relative bias no gradient",
        "functional.attention.long_sequences:long_backward.add",
        inside("add_gradients", unchanged),
        f"{SCORES}::test_attention_with_softcap_and_position_bias_equals_formula",
    ),
    Bug(
        "the score cap is omitted",
        "functional.attention.scores:Scores.scaled",
        inside("soft_cap", unchanged),
        f"{SCORES}::test_attention_with_softcap_and_position_bias_equals_formula",
    ),
    Bug(
        "T5's relative offsets have the wrong sign",
        "functional.attention.scores:RelativeBias.__call__",
        lambda call: lambda self, query, key: call(self, key, query).swapaxes(-2, -1),
        f"{SCORES}::test_attention_with_softcap_and_position_bias_equals_formula",
    ),
    Bug(
        "cached steps omit the bias",
        "functional.attention.scores:Scores.evaluated",
        lambda _: lambda self, query, key: replace(self, bias=None),
        f"{AUTOREGRESSIVE}::test_logits_of_cached_chunks_equal_single_pass",
    ),
    Bug(
        "the bias uses indices, not positions",
        "functional.tokens:Tokens._within_sequence",
        Replace("scores.bias is not None", "False"),
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "the layer pattern starts one layer late",
        "models.config.transformer:_layers",
        Replace("layer % len(pattern)", "(layer + 1) % len(pattern)"),
        f"{INVARIANCE}::test_decoder_logits_equal_float64_reference_loops",
    ),
    Bug(
        "a scan uses the first layer's settings everywhere",
        "functional.stack:_scan",
        takes_first_step,
        f"{INVARIANCE}::test_execution_options_do_not_change_loss_and_gradients",
    ),
    Bug(
        "an encoder's window omits its edge",
        "functional.attention.masks:Near.__call__",
        takes(self=lambda mask: replace(mask, distance=mask.distance - 1)),
        f"{ENCODER}::test_encoder_outputs_equal_float64_reference_loops",
    ),
    Bug(
        "position_offset is ignored",
        "functional.position_vectors:LearnedPositions.add",
        takes(self=lambda positions: replace(positions, offset=0)),
        f"{ENCODER}::test_encoder_outputs_equal_float64_reference_loops",
    ),
    Bug(
        "first_attention_norm is ignored",
        "functional.layers.norms:Unapplied.__call__",
        lambda _: lambda self, weights, x: self.norm(weights, x),
        f"{ENCODER}::test_encoder_outputs_equal_float64_reference_loops",
    ),
    Bug(
        "the loss omits the logit cap",
        "functional.losses.chunked:_chunk_loss",
        inside("soft_cap", unchanged),
        "functional/losses/test_losses.py",
    ),
    Bug(
        "losses of tokens omit the logit cap",
        "functional.losses.chunked:_logits",
        inside("soft_cap", unchanged),
        "functional/losses/test_losses.py",
    ),
    Bug(
        "the head's bias does not learn",
        "functional.losses.chunked:_chunk_gradients",
        Replace('d_head if d_bias is None else d_head | {"bias": d_bias}', "d_head"),
        "functional/losses/test_losses.py",
    ),
    Bug(
        "the gradient of a looked-up logit writes all logits",
        "functional.losses.cross_entropy:smoothed_and_plain",
        Replace(
            "jnp.where(is_target, logits, 0.0).sum(axis=-1)",
            "jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]",
        ),
        "functional/losses/test_losses.py::test_cross_entropy_and_its_gradient_use_no_scatter",
    ),
    Bug(
        "the last sequences of a batched call are missing",
        "decoding.batches:split_batch",
        Replace("range(0, number, most)", "range(0, number - most + 1, most)"),
        "decoding/test_score.py::test_score_in_several_batches_equals_score_in_one_batch",
    ),
    Bug(
        "an invalid sequence is named by its number within the batch",
        "decoding.fill:fill",
        Replace("np.pad(broken, (at, 0))", "broken"),
        "decoding/test_fill.py::test_fill_error_for_nan_logits_names_the_batch_element",
    ),
)
