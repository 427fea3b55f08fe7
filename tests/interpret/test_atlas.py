"""The head atlas holds the scores and effects of every head, and follows the runs' checkpoints."""

from functools import cache

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.checkpoint import CheckpointWriter
from jaxformer.artifacts.run import RunFolder
from jaxformer.interpret import atlas
from jaxformer.interpret.ablation import ablate_heads
from jaxformer.interpret.atlas import (
    AtlasSettings,
    HeadAtlas,
    atlas_over_checkpoints,
    head_atlas,
    read_checkpoints,
)
from jaxformer.interpret.pictures import atlas_figure, history_figure
from jaxformer.interpret.scores import ScoreSettings, cross_scores, head_scores
from jaxformer.interpret.texts import next_token_batch
from jaxformer.training.batch import Batch
from jaxformer.training.config import Inputs
from jaxformer.training.presets import training_preset
from jaxformer.training.run_folders import write_run
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
SEQUENCES, LENGTH = 5, 8
SETTINGS = AtlasSettings(delimiters=(1, 2), window=2, batch_size_within_memory=2)


@cache
def measured():
    """Returns (model, variables, batch, atlas) for sequences with padding and two documents."""
    model = tiny.build(positions="rotary", num_layers=1)
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, SEQUENCES, LENGTH) % 4
    segment_ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0]] * 4 + [[1] * 8])
    batch = next_token_batch(model, tokens, segment_ids)
    return model, variables, batch, head_atlas(model, variables, batch, SETTINGS)


@pytest.mark.slow
def test_measured_head_scores_equal_scores_of_captured_attention_weights():
    model, variables, batch, found = measured()
    point = "attention.weights"
    seen = jf.inspect(
        model, variables, batch.inputs, segment_ids=batch.segment_ids, capture=(point,)
    )
    settings = ScoreSettings((1, 2), 2)
    expected = head_scores(
        seen.captured[point], batch.inputs, batch.segment_ids, settings
    )._asdict()
    assert found.scores.keys() == expected.keys()
    for name, score in found.scores.items():
        tiny.close(score, expected[name])


@pytest.mark.slow
def test_measured_head_effects_equal_those_of_ablate_heads():
    model, variables, batch, found = measured()
    expected = ablate_heads(model, variables, batch)
    tiny.close(found.effect, expected.effect)
    tiny.close(found.standard_error, expected.standard_error)
    tiny.close(found.loss, expected.loss)
    assert found.num_sequences == SEQUENCES


@pytest.mark.parametrize("attention", mostly_slow(["cross_attention", "encoder.attention"]))
def test_head_scores_cover_cross_attention_and_encoder_attention(attention):
    model = tiny.build(jf.EncoderDecoderConfig, num_layers=1, num_encoder_layers=1)
    variables, source = tiny.weights(model, 0), tiny.sources(model, 0, SEQUENCES)
    batch = next_token_batch(model, tiny.tokens(0, SEQUENCES, LENGTH), None, source)
    settings = SETTINGS._replace(attention=attention)
    found = head_atlas(model, variables, batch, settings)
    point = f"{attention}.weights"
    weights = jf.inspect(model, variables, batch.inputs, source=source, capture=(point,)).captured
    if attention == "cross_attention":
        expected = cross_scores(weights[point], None, batch.source_segment_ids)
    else:
        both_ways = ScoreSettings((1, 2), 2, bidirectional=True)
        expected = head_scores(weights[point], batch.source, batch.source_segment_ids, both_ways)
    for name, score in expected._asdict().items():
        tiny.close(found.scores[name], score)


@pytest.mark.slow
def test_head_effects_of_an_encoder_are_measured_on_masked_tokens():
    model = tiny.build(jf.EncoderConfig, num_layers=1)
    tokens, weights = tiny.tokens(0, SEQUENCES, LENGTH), np.eye(SEQUENCES, LENGTH, dtype=np.float32)
    batch = Batch(np.where(weights, 3, tokens), tokens, weights)
    found = head_atlas(model, tiny.weights(model, 0), batch, SETTINGS)
    assert found.effect.shape == (1, 4) and np.isfinite(found.loss)


def small_atlas():
    """Returns an atlas of two layers of two heads."""
    scores = {
        "induction": np.array([[0.1, 0.4], [0.3, np.nan]]),
        "delimiter": np.full((2, 2), np.nan),
    }
    return HeadAtlas(scores, np.array([[1.0, -1], [3, 2]]), np.full((2, 2), 0.5), 2.0, 7)


def test_table_of_head_scores_is_sorted_by_the_chosen_column():
    """Rows have every head once; NaN comes last."""
    rows = small_atlas().table()
    assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert rows[0]["effect"] == 3.0 and rows[0]["induction"] == 0.3
    assert list(rows[0]) == ["layer", "head", "induction", "delimiter", "effect", "standard_error"]
    by_score = [row["induction"] for row in small_atlas().table("induction")]
    assert by_score[:3] == [0.4, 0.3, 0.1] and np.isnan(by_score[3])
    assert "sort_by is 'x'; it must be one of induction" in error_of(small_atlas().table, "x")


@pytest.mark.slow
def test_head_scores_over_training_include_every_checkpoint(monkeypatch):
    """Each checkpoint is measured before the next one is read."""
    model, variables, batch, expected = measured()
    events, observe = [], atlas._observe

    def observed(*arguments):
        events.append("measured")
        return observe(*arguments)

    def checkpoints():
        for step, factor in [(0, 0.0), (10, 1.0)]:
            events.append(f"read {step}")
            yield step, jax.tree.map(lambda x, by=factor: by * x, variables)

    monkeypatch.setattr(atlas, "_observe", observed)
    history = atlas_over_checkpoints(model, checkpoints(), batch, SETTINGS)
    assert events == ["read 0", "measured", "read 10", "measured"]
    assert history.steps.tolist() == [0, 10]
    for name, score in history.scores.items():
        assert score.shape == (2, 1, 4)
        tiny.close(score[1], expected.scores[name])
    tiny.close(history.loss, [np.log(model.config.vocab_size), expected.loss])


def saved_run(path):
    """Returns a run folder with checkpoints of steps 1 and 2, and their parameters."""
    config = training_preset("tiny", "decoder")
    folder = RunFolder(path)
    path.mkdir()
    write_run(folder, Inputs(()), config)
    model = jf.build(config.model)
    params = {step: tiny.weights(model, step)["params"] for step in (1, 2)}
    with CheckpointWriter(folder.checkpoints) as writer:
        for step, tree in params.items():
            writer.save(step, tree, {"x": np.zeros(1)}, {})
    return folder, params


def test_read_checkpoints_loads_one_training_step_at_a_time(tmp_path):
    folder, params = saved_run(tmp_path / "run")
    found = read_checkpoints(folder)
    for expected in (1, 2):
        step, variables = next(found)
        assert step == expected
        tiny.all_close(variables["params"], params[step], 0)
    assert [step for step, _ in read_checkpoints(folder, [2])] == [2]
    message = error_of(next, read_checkpoints(folder, [2, 3]))
    assert "no complete checkpoint of step 3; its checkpoints are of steps 1, 2" in message
    (next(iter((folder.checkpoints / "1" / "params").rglob("*.ocdbt"))).write_bytes(b""))
    assert "is damaged" in error_of(list, read_checkpoints(folder))
    assert "is not a run" in error_of(next, read_checkpoints(RunFolder(tmp_path)))


@pytest.mark.slow
def test_head_score_figures_have_panel_per_score_and_line_per_head(tmp_path):
    """A score that is NaN for every head has no table."""
    figure = atlas_figure({"text": small_atlas(), "code": small_atlas()})
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["induction", "ablation, nats\n(± 0.5 at most)"] * 2
    model, variables, batch, _ = measured()
    history = atlas_over_checkpoints(model, [(0, variables), (5, variables)], batch, SETTINGS)
    lines = history_figure(history, ("induction", "local"))
    assert [len(axes.lines) for axes in lines.axes] == [4, 4, 1]
    for number, each in enumerate((figure, lines)):
        each.savefig(tmp_path / f"{number}.png")
    assert "names contain 'x'; they must be in previous_token" in error_of(
        history_figure, history, ("x",)
    )
    assert "atlases is empty" in error_of(atlas_figure, {})


WRONG = {
    "tokens are int64 (2, 3, 1); they must be int [batch, length]": np.zeros((2, 3, 1), int),
    "tokens are (2, 0); pass at least two sequences": np.zeros((2, 0), int),
    "tokens are (1, 3); pass at least two sequences": np.zeros((1, 3), int),
    "batch element 0 has only targets of weight 0": np.zeros((2, 1), int),
    "tokens are sequences of unequal lengths": [[1], [1, 2]],
}


@pytest.mark.slow
@pytest.mark.parametrize("message", WRONG)
def test_measuring_head_scores_raises_error_that_names_invalid_argument(message):
    model, variables, *_ = measured()
    assert message in error_of(head_atlas, model, variables, WRONG[message])


@pytest.mark.slow
def test_head_scores_reject_invalid_settings_and_models_without_heads():
    model, variables, batch, _ = measured()
    lstm = tiny.build(jf.RecurrentConfig, cell="lstm")
    assert "model is a Recurrent without 'attention' heads" in error_of(
        head_atlas, lstm, tiny.weights(lstm, 0), batch
    )
    for message, change in {
        "window is 0": {"window": 0},
        "batch_size_within_memory is 1.5; it must be a whole number": {
            "batch_size_within_memory": 1.5
        },
        "delimiters is -1": {"delimiters": (-1,)},
    }.items():
        settings = SETTINGS._replace(**change)
        assert message in error_of(head_atlas, model, variables, batch, settings)
    assert "checkpoints has no item" in error_of(atlas_over_checkpoints, model, [], batch)
