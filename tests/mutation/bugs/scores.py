"""Scores that are adjusted, and layers that differ."""

from tests.mutation.bug import AUTOREGRESSIVE, INVARIANCE, Bug
from tests.mutation.changes import Replace

SCORES = "functional/test_scores.py"
ENCODER = "models/test_encoder.py"

BUGS = (
    Bug(
        "a short row's tiles teach the relative bias nothing",
        "functional.blockwise:_short_backward",
        Replace("_sum(d_scores, more)", "d_scores"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "a long row's tiles teach the relative bias nothing",
        "functional.blockwise:_long_backward.add",
        Replace("_sum(d_scores, learnt)", "d_scores"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "the cap of the scores is left out",
        "functional.scores:Scores.scaled",
        Replace("capped(self.scale * products, self.cap)", "self.scale * products"),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "T5's bias is asked the other way round",
        "functional.scores:RelativeBias.__call__",
        Replace(
            "key.position_ids()[..., None, :] - query.position_ids()[..., :, None]",
            "query.position_ids()[..., :, None] - key.position_ids()[..., None, :]",
        ),
        f"{SCORES}::test_scores_are_their_formula",
    ),
    Bug(
        "a step over the cache leaves the bias out",
        "functional.scores:Scores.asked",
        Replace("replace(self, bias=DenseBias(self.bias(query, key)))", "replace(self, bias=None)"),
        f"{AUTOREGRESSIVE}::test_any_chunking_is_one_pass",
    ),
    Bug(
        "the bias counts places in the row",
        "functional.transformer:whole_rows",
        Replace("scores.bias is not None", "False"),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "the pattern of layers begins one too late",
        "models.config.transformer:_layers",
        Replace("layer % len(entries)", "(layer + 1) % len(entries)"),
        f"{INVARIANCE}::test_the_model_is_its_formula",
    ),
    Bug(
        "a scan runs the first setting in every layer",
        "functional.layers:over_layers.one_period",
        Replace("settings[first : first + period]", "settings[:1] * period"),
        f"{INVARIANCE}::test_how_a_model_runs_changes_nothing",
    ),
    Bug(
        "an encoder's window leaves its edge out",
        "functional.masks:Near.__call__",
        Replace("abs(offset) <= self.distance", "abs(offset) < self.distance"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "positions begin at the table's first row",
        "functional.embedding:add_positions",
        Replace("positions + config.position_offset", "positions"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "the first layer is normalised after all",
        "functional.blocks:norms_of.first",
        Replace("not config.first_attention_norm", "False"),
        f"{ENCODER}::test_the_encoder_is_its_formula",
    ),
    Bug(
        "the cap of the logits is left out of the loss",
        "functional.losses:_logits",
        Replace(
            "capped(linear(head, hidden, jnp.float32), cap)", "linear(head, hidden, jnp.float32)"
        ),
        "functional/test_losses.py",
    ),
)
