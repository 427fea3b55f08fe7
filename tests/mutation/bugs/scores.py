"""Bugs of score modifiers and of settings that differ between layers."""

from tests.mutation.bug import AUTOREGRESSIVE, INVARIANCE, Bug
from tests.mutation.changes import Replace

SCORES = "functional/test_scores.py"
ENCODER = "models/test_encoder.py"

BUGS = (
    Bug(
        "short sequences give the relative bias no gradient",
        "functional.blockwise:_short_backward",
        Replace("add_gradients(d_scores, more)", "d_scores"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "long sequences give the relative bias no gradient",
        "functional.blockwise:_long_backward.add",
        Replace("add_gradients(d_scores, more.scores)", "d_scores"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "the score cap is omitted",
        "functional.scores:Scores.scaled",
        Replace("soft_cap(self.scale * products, self.cap)", "self.scale * products"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "T5's relative offsets have the wrong sign",
        "functional.scores:RelativeBias.__call__",
        Replace(
            "key.position_ids()[..., None, :] - query.position_ids()[..., :, None]",
            "query.position_ids()[..., :, None] - key.position_ids()[..., None, :]",
        ),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "cached steps omit the bias",
        "functional.scores:Scores.evaluated",
        Replace("replace(self, bias=DenseBias(self.bias(query, key)))", "replace(self, bias=None)"),
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "the bias uses indices, not positions",
        "functional.contexts:sequence_contexts",
        Replace("scores.bias is not None", "False"),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "the layer pattern starts one layer late",
        "models.config.transformer:_layers",
        Replace("layer % len(entries)", "(layer + 1) % len(entries)"),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "a scan uses the first layer's settings everywhere",
        "functional.transformer:scan_layers",
        Replace("settings[start:stop]", "settings[:1] * (stop - start)"),
        f"{INVARIANCE}::test_how_a_model_runs_changes_nothing",
    ),
    Bug(
        "an encoder's window omits its edge",
        "functional.masks:Near.__call__",
        Replace("abs(offset) <= self.distance", "abs(offset) < self.distance"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "position_offset is ignored",
        "functional.embedding:add_positions",
        Replace("positions + config.position_offset", "positions"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "first_attention_norm is ignored",
        "functional.blocks:norm_before",
        Replace("not config.first_attention_norm", "False"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "the loss omits the logit cap",
        "functional.losses:_logits",
        Replace(
            "soft_cap(linear(head, hidden, jnp.float32), cap)", "linear(head, hidden, jnp.float32)"
        ),
        "functional/test_losses.py",
    ),
)
