"""`jaxformer sweep`: its runs equal single runs, it continues, and one diverged run stops none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.training import group, processes
from jaxformer.training.run_folders import checkpoint_step
from tests.cli.conftest import SETTINGS, TEXT

SMALL = [*SETTINGS, "--num-layers", "1"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(TEXT)
    return str(path)


def swept(capsys, *words):
    """Runs a sweep and returns {folder name: lines of metrics.jsonl} and its results."""
    assert main(["sweep", *words, *SMALL, "--out", "S", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["settings"]
    folders = sorted(path.parent for path in Path("S").glob("*/config.json"))
    return {path.name: RunFolder(path).read_metrics() for path in folders}, results


def sizes_in(folder, name):
    """Returns the values of a field of the models in a sweep's folder."""
    configs = [json.loads(path.read_text()) for path in Path(folder).glob("*/config.json")]
    return {config["model"][name] for config in configs}


def losses(lines, name="loss"):
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
def test_runs_of_a_sweep_equal_single_runs(text, capsys):
    """They have the losses, the held-out losses and the weights of `jaxformer train`."""
    runs, results = swept(
        capsys, text, "--vary", "seed=3..5", "--vary", "learning-rate=0.001,0.01", "--score-all"
    )
    assert len(runs) == 6
    for name, options in {
        "seed-4_learning-rate-0.01": ["--seed", "4", "--learning-rate", "0.01"],
        "seed-3_learning-rate-0.001": ["--seed", "3", "--learning-rate", "0.001"],
    }.items():
        assert main(["train", text, *SMALL, *options, "--out", "one"]) == 0
        capsys.readouterr()
        alone = RunFolder("one").read_metrics()
        for figure in ("loss", "gradient_norm", "learning_rate", "held_out_loss", "part_loss"):
            np.testing.assert_allclose(
                losses(runs[name], figure), losses(alone, figure), rtol=2e-3, atol=2e-5
            )
        assert [line["step"] for line in runs[name]] == [line["step"] for line in alone]
        ours, theirs = (jf.load(path)[1] for path in (f"S/{name}", "one"))
        chex.assert_trees_all_close(ours, theirs, atol=1e-3)
        Path("one").rename(f"one-{name}")
    by_rate = {x["setting"]["learning-rate"]: x for x in results}
    for rate, found in by_rate.items():
        last = [
            losses(runs[f"seed-{n}_learning-rate-{rate}"], "held_out_loss")[-1] for n in (3, 4, 5)
        ]
        np.testing.assert_allclose(found["held_out_loss"], np.mean(last))
        np.testing.assert_allclose(found["standard_error"], np.std(last, ddof=1) / 3**0.5)
    assert Path("S/sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_on_several_devices_equal_runs_on_one_device(text, capsys):
    """Three runs on two devices, one of which has a place left, equal three programs of a run."""
    words = [text, "--vary", "learning-rate=0.001,0.003,0.01"]
    runs, _ = swept(capsys, *words, "--together", "1")
    two = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "jaxformer", "sweep", *words, *SMALL, "--out", "two"]
    subprocess.run(command, env=two, check=True, capture_output=True)
    for name, lines in runs.items():
        found = RunFolder(f"two/{name}").read_metrics()
        for figure in ("loss", "held_out_loss"):
            np.testing.assert_allclose(losses(found, figure), losses(lines, figure), rtol=1e-4)


@pytest.mark.slow
def test_an_interrupted_sweep_continues_and_ends_with_the_same_losses(text, capsys, monkeypatch):
    words = [text, "--vary", "seed=0,1", "--vary", "norm=rms,layer"]
    whole, _ = swept(capsys, *words)
    Path("S").rename("whole")
    follow_up, calls = group.RunGroup._follow_up, []

    def interrupted(self, signal, show):
        calls.append(signal)
        return follow_up(self, processes.SIGINT if len(calls) in (7, 12) else None, show)

    monkeypatch.setattr(group.RunGroup, "_follow_up", interrupted)
    for _ in range(2):
        assert main(["sweep", *words, *SMALL, "--out", "S"]) == 130
        error = capsys.readouterr().err
        step = int(re.search(r"stopped at step (\d+), which is saved", error)[1])
        saved = [checkpoint_step(RunFolder(path)) for path in Path("S").glob("*_norm-*")]
        assert saved.count(step) == 2 and "repeat the command with --out S" in error
    found, results = swept(capsys, *words)
    assert found.keys() == whole.keys() and all(x["runs"] == 2 for x in results)
    for name, lines in found.items():
        np.testing.assert_allclose(losses(lines), losses(whole[name]), rtol=1e-5)
        np.testing.assert_allclose(
            losses(lines, "held_out_loss"), losses(whole[name], "held_out_loss"), rtol=1e-5
        )
    calls.clear()
    swept(capsys, *words)
    assert calls == []  # Nothing is left to train.


@pytest.mark.slow
def test_diverged_run_does_not_affect_other_runs_of_a_sweep(text, capsys):
    runs, results = swept(capsys, text, "--vary", "learning-rate=0.001,1e30", "--vary", "seed=0,1")
    good, bad = results
    assert (good["diverged"], bad["diverged"]) == (0, 2)
    assert np.isfinite(good["held_out_loss"]) and bad["held_out_loss"] is None
    assert losses(runs["learning-rate-0.001_seed-0"], "held_out_loss")
    again, _ = swept(capsys, text, "--vary", "learning-rate=0.001,1e30", "--vary", "seed=0,1")
    assert again == runs  # A diverged run is not repeated.


@pytest.mark.slow
def test_sweep_trains_settings_listed_in_a_file_and_models_of_different_sizes(text, capsys):
    Path("list.txt").write_text("--mlp-dim 16 --num-heads 2\n\n--mlp-dim 24  # wider\n")
    runs, results = swept(
        capsys, text, "--list", "list.txt", "--vary", "seed=0,1", "--together", "1"
    )
    assert [x["setting"] for x in results] == [
        {"mlp-dim": "16", "num-heads": "2"},
        {"mlp-dim": "24"},
    ]
    widths = sizes_in("S", "mlp_dim")
    assert len(runs) == 4 and widths == {16, 24}
    Path("S").rename("first")
    sizes_varied = [word for word in SMALL if word not in ("--vocab-size", "300")]
    assert main(["sweep", text, *sizes_varied, "--vary", "vocab-size=280,300", "--out", "S"]) == 0
    sizes = {
        json.loads(path.read_text())["model"]["vocab_size"]
        for path in Path("S").glob("*/config.json")
    }
    assert sizes == {280, 300}


@pytest.mark.slow
def test_runs_with_different_programs_are_trained_one_after_another(trained, text, capsys):
    """Tuning a checkpoint with adapters of two ranks."""
    words = ["sweep", text, "--init-from", str(trained), "--vary", "lora-rank=2,4"]
    assert main([*words, "--steps", "4", "--out", "T", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["settings"]
    assert [x["setting"] for x in results] == [{"lora-rank": "2"}, {"lora-rank": "4"}]
    assert all(np.isfinite(x["held_out_loss"]) for x in results)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--vary is missing"),
        (["--vary", "seed"], "write it as FLAG=A,B"),
        (["--vary", "seed=4..2"], "the range must not be empty"),
        (["--vary", "sed=1,2"], "unknown option --sed; did you mean --seed? (with --sed 1)"),
        (["--vary", "seed=1,x"], "--seed is 'x'; it must be a whole number (with --seed x)"),
        (["--vary", "seed=1,2", "--seed", "3"], "--seed has a value and is also varied"),
        (["--vary", "seed=1,2", "--vary", "seed=3"], "--vary has a flag twice"),
        (["--vary", "seed=1,1"], "--seed 1 is given twice"),
        (["--vary", "seed=1,2", "--resume"], "--resume and --out belong to a single run"),
        (
            [
                *("--vary", "seed=1,2", "--coordinator", "a:1"),
                *("--num-processes", "2", "--process-id", "0"),
            ],
            "--coordinator has no effect in a sweep",
        ),
        (["--vary", "num-heads=3", "--embed-dim", "32"], "(with --num-heads 3)"),
        (["--vary", "seed=1,2", "--together", "0"], "--together is 0; it must be at least 1"),
        (["--list", "empty.txt"], "has no settings"),
        (["--list", "bad.txt"], "line 2: 'rms' must follow a flag"),
        (["missing.txt", "--vary", "seed=1,2"], "missing.txt"),
    ],
)
def test_invalid_sweeps_are_rejected_before_any_folder_is_written(capsys, tmp_path, words, said):
    Path("empty.txt").write_text("# nothing\n")
    Path("bad.txt").write_text("--norm rms\nrms\n")
    before = sorted(tmp_path.iterdir())
    assert main(["sweep", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_sweep_rejects_an_output_folder_that_contains_another_sweep_or_other_files(
    capsys, tmp_path
):
    Path("S").mkdir()
    Path("S/notes.txt").write_text("mine")
    assert main(["sweep", "--vary", "seed=0,1", "--out", "S"]) == 2
    assert "is not empty and contains no sweep" in capsys.readouterr().err
    content = {"format": 1, "command": [], "runs": {"seed-0": {"seed": "0"}}}
    Path("S/sweep.json").write_text(json.dumps(content))
    assert main(["sweep", "--vary", "seed=0,1", "--out", "S"]) == 2
    assert "contains a sweep with other settings" in capsys.readouterr().err
    Path("S/sweep.json").write_text(json.dumps({**content, "format": 9}))
    assert main(["sweep", "--vary", "seed=0", "--out", "S"]) == 2
    assert "has format 9; jaxformer reads format 1" in capsys.readouterr().err
