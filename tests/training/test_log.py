"""The log of a run, and experiment trackers."""

import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import DecoderConfig
from jaxformer.training.config import TextTraining
from jaxformer.training.log import TRACKERS, RunLog, Tracker, finite, require_trackers, score_line
from jaxformer.training.step import Measured
from jaxformer.training.tasks.task import Score

MEASURED = [
    Measured({"loss": jnp.float32(loss)}, jnp.float32(norm))
    for loss, norm in ((2.5, 1), (np.nan, 3))
]


def written(folder, log):
    """Logs two updates, the second with a loss that is not finite, and returns the lines."""
    with log:
        for step, measured in enumerate(MEASURED, 1):
            log.update(step, 0.1 * step, measured)
        lines = log.flush({"tokens_per_second": 7.0})
    assert folder.read_metrics() == lines
    return lines


def test_log_lists_names_of_non_finite_training_values_instead_of_the_values(tmp_path):
    """Each line is valid JSON."""
    folder = RunFolder(tmp_path)
    lines = written(folder, RunLog(folder, TextTraining(DecoderConfig()), None))
    assert lines == [
        {"step": 1, "loss": 2.5, "gradient_norm": 1.0, "learning_rate": 0.1},
        {
            "step": 2,
            "gradient_norm": 3.0,
            "learning_rate": 0.2,
            "not_finite": ["loss"],
            "tokens_per_second": 7.0,
        },
    ]
    strict = {"parse_constant": lambda name: pytest.fail(name)}
    assert [json.loads(line, **strict) for line in folder.metrics.read_text().splitlines()] == lines


def test_metrics_log_contains_every_named_value_of_the_objective(tmp_path):
    """With label smoothing, `loss` is comparable to a held-out loss."""
    log = RunLog(RunFolder(tmp_path), TextTraining(DecoderConfig()), None)
    log.update(1, 0.1, Measured({"loss": 2.5, "smoothed_loss": 3.5}, 1.0))
    (line,) = log.flush({})
    assert (line["loss"], line["smoothed_loss"]) == (2.5, 3.5)


def test_trackio_and_wandb_receive_the_metrics(tmp_path, monkeypatch):
    """Only numbers are sent, through the interface that trackio and wandb share."""
    told = []
    service = SimpleNamespace(
        init=lambda **run: told.append(("init", run["name"][:5], run["config"]["seed"])),
        log=lambda figures, step: told.append((step, figures)),
        finish=lambda: told.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", service)
    folder = RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    first, second = written(
        folder, RunLog(folder, TextTraining(DecoderConfig(), trackers=("trackio",), seed=5), None)
    )
    del first["step"], second["step"], second["not_finite"]
    assert told == [("init", "a run", 5), (1, first), (2, second), "finish"]


def test_trackers_resume_a_run_and_distinguish_runs_of_equal_folder_name(tmp_path, monkeypatch):
    begun = []
    service = SimpleNamespace(init=lambda **run: begun.append(run), log=None, finish=None)
    monkeypatch.setitem(sys.modules, "wandb", service)
    for name in ("here/run", "there/run", "here/run"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        TRACKERS["wandb"](RunFolder(tmp_path / name), {})
    here, there, again = ((run["id"], run["name"]) for run in begun)
    assert here == again and here[0] != there[0] and here[1] != there[1]


def test_failing_experiment_tracker_does_not_end_the_run(tmp_path):
    """A warning names the tracker, and metrics.jsonl stays complete."""
    told = []

    def fail(step, figures):
        told.append(step)
        raise OSError("no network")

    folder = RunFolder(tmp_path)
    log = RunLog(folder, TextTraining(DecoderConfig()), None)
    log._trackers.append(Tracker("a service", fail, lambda: None))
    with pytest.warns(UserWarning, match="a service failed and was switched off: no network"):
        for step, measured in enumerate(MEASURED, 1):
            log.update(step, 0.1, measured)
        log.flush({})
    assert told == [1] and len(folder.read_metrics()) == 2


def test_log_lists_the_name_of_a_non_finite_held_out_loss_instead_of_its_value():
    line = finite({"step": 3, **score_line("bleu", Score(float("nan"), 0.0, 7))})
    assert line == {"step": 3, "bleu": 0.0, "scored": 7, "not_finite": ["held_out_loss"]}


def test_tensorboard_receives_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    config = TextTraining(DecoderConfig(), trackers=("tensorboard",))
    written(folder, RunLog(folder, config, None))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        name: [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    assert found["loss"] == [(1, 2.5)] and found["gradient_norm"] == [(1, 1.0), (2, 3.0)]
    assert found["tokens_per_second"] == [(2, 7.0)]


def test_experiment_tracker_that_is_not_installed_is_rejected(monkeypatch):
    monkeypatch.setattr("jaxformer.training.log.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb is not installed; run: pip install wandb"):
        require_trackers(("wandb",))
