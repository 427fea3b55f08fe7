"""Tests of `jaxformer compare`: differing settings, results and the picture."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer.artifacts.run import Origin, RunFolder
from jaxformer.cli import main
from jaxformer.models.config import DecoderConfig, EncoderConfig, RecurrentConfig
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training import compare
from jaxformer.training.config import Inputs, MaskedTokensTraining, OptimizerConfig, TextTraining
from jaxformer.training.run_folders import write_run
from jaxformer.training.tasks import task_class

NOTHING = Inputs()
CONFIG = TextTraining(DecoderConfig(vocab_size=300, num_layers=1, embed_dim=16, num_heads=2))


@pytest.fixture
def run(tmp_path):
    """Makes a run folder from a config and one loss per step; the last step is scored."""

    def make(name, config, *losses, inputs=NOTHING):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir(parents=True)
        write_run(folder, inputs, config)
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        if lines:
            lines[-1] |= {"tokens_per_second": 50.0, "seconds": 3.5}
            score = {"held_out_loss": 2.0, task_class(config).measure.name: 1.5, "scored": 9}
            lines.append({"step": len(losses), **score})
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder.path)

    return make


def compared(capsys, *words):
    assert main(["compare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_compare_lists_only_differing_settings(run, capsys):
    fast = replace(CONFIG, optimizer=OptimizerConfig(learning_rate=0.01), seed=3)
    found = compared(capsys, run("a", CONFIG, 5.0, 4.0), run("b", fast, 5.0, 3.0, 2.0))
    assert found["settings"] == {"learning_rate": [6e-4, 0.01], "seed": [0, 3]}
    assert [one["steps"] for one in found["runs"]] == [2, 3]
    assert [one["run"] for one in found["runs"]] == ["a", "b"]
    assert all(one["seconds"] == 3.5 and one["bits_per_byte"] == 1.5 for one in found["runs"])


def test_compare_accepts_runs_of_different_models(run, capsys):
    """Of the other fields, only those that both kinds have are compared."""
    model = RecurrentConfig(vocab_size=300, num_layers=1, embed_dim=16)
    other = replace(CONFIG, model=model, optimizer=OptimizerConfig(learning_rate=0.01))
    found = compared(capsys, run("x/a", CONFIG, 5.0), run("y/a", other, 5.0))
    assert found["settings"] == {
        "model": ["decoder", "recurrent"],
        "learning_rate": [6e-4, 0.01],
        "head_bias": [False, True],
    }
    assert [one["run"][-3:] for one in found["runs"]] == ["x/a", "y/a"]  # equal folder names


def test_compare_shows_different_base_checkpoints_and_lora_ranks(run, capsys):
    """The ranks of their adapters are compared too."""
    few, many = (replace(CONFIG, lora=LoraConfig(lora_rank=rank)) for rank in (2, 4))
    inputs = [Inputs((Path("x"),), origin=Origin(Path(base))) for base in ("one", "other")]
    runs = run("a", few, 5.0, inputs=inputs[0]), run("b", many, 5.0, inputs=inputs[1])
    found = compared(capsys, *runs)
    assert found["settings"] == {"init_from": ["one", "other"], "lora_rank": [2, 4]}


def test_compare_does_not_overwrite_an_existing_picture(run, capsys, tmp_path):
    folder = run("a", CONFIG, 5.0)
    pictures = [compared(capsys, folder)["picture"] for _ in range(3)]
    assert pictures == ["compare.png", "compare-2.png", "compare-3.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "RUN is missing"), (["nothing"], "is not a run"), (["untrained"], "no losses yet")],
)
def test_compare_rejects_invalid_arguments(run, capsys, tmp_path, words, said):
    run("untrained", CONFIG)
    assert main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


def figure_of(monkeypatch, capsys, *runs):
    """Returns what `compare` prints, and the figure that it draws with its title."""
    drawn = []
    monkeypatch.setattr(compare, "write_figure", lambda *drawing, **_: drawn.append(drawing[:2]))
    return compared(capsys, *runs), *drawn[0]


def test_compare_warns_about_different_texts_or_tokenizers(run, capsys, monkeypatch):
    folders = [run(name, CONFIG, 5.0, 4.0) for name in "abcd"]
    for folder, text, tokens in zip(folders, ("x", "x", "y", "x"), "1112", strict=True):
        Path(folder, "documents.txt").write_text(text)
        Path(folder, "tokenizer.json").write_text(tokens)
    for other, expected in zip(
        folders, (None, None, "different texts", "different tokenizers"), strict=True
    ):
        found, figure, title = figure_of(monkeypatch, capsys, folders[0], other)
        assert found["not_comparable"] == expected
        assert (f"because the runs have {expected}" in title) if expected else title == ""
        assert len(figure.axes) == (6 if expected else 3)


def test_compare_warns_about_different_tasks(run, capsys, monkeypatch):
    masked = MaskedTokensTraining(
        EncoderConfig(vocab_size=300, num_layers=1, embed_dim=16, num_heads=2)
    )
    found, *_ = figure_of(monkeypatch, capsys, run("a", CONFIG, 5.0), run("b", masked, 5.0))
    assert found["not_comparable"] == "different objectives"


def test_a_diverged_run_does_not_dominate_the_loss_curves(run, capsys, monkeypatch):
    """The axes show the losses of the other run, and the legend names the largest loss."""
    good = run("good", CONFIG, *np.linspace(5.0, 2.0, 50))
    bad = run("bad", CONFIG, *np.linspace(5.0, 2.0, 20), *np.linspace(100.0, 12_000.0, 30))
    with Path(bad, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 51, "not_finite": ["loss"]}) + "\n")
    _, figure, _ = figure_of(monkeypatch, capsys, good, bad)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert 1.5 < low < 2.1 and high == pytest.approx(5.5)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "good" and "not finite at step 51" in labels[1]
    assert "loss up to" in labels[1]


def test_loss_plot_of_compare_shows_every_loss_if_no_run_diverged(run, capsys, monkeypatch):
    runs = [run(name, CONFIG, *np.linspace(first, 2.0, 50)) for name, first in (("a", 5), ("b", 9))]
    _, figure, _ = figure_of(monkeypatch, capsys, *runs)
    for axes in figure.axes[:2]:
        highest = max(line.get_ydata().max() for line in axes.lines if len(line.get_ydata()))
        assert axes.get_ylim()[1] >= highest


def test_runs_that_differ_only_in_the_seed_are_drawn_as_their_mean_and_standard_error(
    run, capsys, monkeypatch
):
    losses = np.array([[5.0, 4.0, 3.5], [5.2, 4.4, 3.1], [5.4, 4.1, 3.0]])
    seeds = [run(f"s{n}", replace(CONFIG, seed=n), *losses[n]) for n in range(3)]
    fast = replace(CONFIG, optimizer=OptimizerConfig(learning_rate=0.01))
    other = run("fast", fast, 6.0, 5.0, 4.0)
    _, figure, _ = figure_of(monkeypatch, capsys, *seeds, other)
    axes = figure.axes[0]
    smooth = np.array([compare.smoothed(list(row)) for row in losses])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), smooth.mean(axis=0))
    assert len(axes.lines) == 2 and len(axes.collections) == 1
    error = smooth.std(axis=0, ddof=1) / 3**0.5
    edges = axes.collections[0].get_paths()[0].vertices
    for step, mean, deviation in zip((1, 2, 3), smooth.mean(axis=0), error, strict=True):
        at = edges[edges[:, 0] == step, 1]
        np.testing.assert_allclose([at.min(), at.max()], [mean - deviation, mean + deviation])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["s0\nmean of 3 seeds", "fast"]


def test_diverged_runs_and_repeated_seeds_are_not_averaged(run, capsys, monkeypatch):
    good, same = (run(name, CONFIG, 5.0, 4.0) for name in ("good", "same"))
    bad = run("bad", replace(CONFIG, seed=1), 5.0, 900.0)
    with Path(bad, "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "not_finite": ["loss"]}) + "\n")
    _, figure, _ = figure_of(monkeypatch, capsys, good, same, bad)
    assert len(figure.axes[0].lines) == 3 and not figure.axes[0].collections
