"""Tests of `jaxformer compare`: differing settings, results and the picture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.artifacts.origin import Origin
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.models.config import DecoderConfig, RecurrentConfig
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.config import Inputs, OptimizerConfig, TextTraining
from jaxformer.training.run_folders import write_run

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
            score = {"held_out_loss": 2.0, "bits_per_byte": 1.5, "scored": 9}
            lines.append({"step": len(losses), **score})
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(folder.path)

    return make


def compared(capsys, *words):
    assert main(["compare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_only_differing_settings_are_listed(run, capsys):
    fast = replace(CONFIG, optimizer=OptimizerConfig(learning_rate=0.01), seed=3)
    found = compared(capsys, run("a", CONFIG, 5.0, 4.0), run("b", fast, 5.0, 3.0, 2.0))
    assert found["settings"] == {"learning_rate": [6e-4, 0.01], "seed": [0, 3]}
    assert [one["steps"] for one in found["runs"]] == [2, 3]
    assert [one["run"] for one in found["runs"]] == ["a", "b"]
    assert all(one["seconds"] == 3.5 and one["bits_per_byte"] == 1.5 for one in found["runs"])


def test_runs_of_different_kinds_are_compared(run, capsys):
    """Of the other fields, only those that both kinds have are compared."""
    model = RecurrentConfig(vocab_size=300, num_layers=1, embed_dim=16)
    other = replace(CONFIG, model=model, optimizer=OptimizerConfig(learning_rate=0.01))
    found = compared(capsys, run("x/a", CONFIG, 5.0), run("y/a", other, 5.0))
    assert found["settings"] == {
        "model": ["decoder", "recurrent"],
        "learning_rate": [6e-4, 0.01],
        "head_bias": [False, True],
    }
    assert [one["run"][-3:] for one in found["runs"]] == ["x/a", "y/a"]  # folders of one name


def test_inputs_and_origins_are_compared(run, capsys):
    """The ranks of their adapters are compared too."""
    few, many = (replace(CONFIG, lora=LoraConfig(lora_rank=rank)) for rank in (2, 4))
    inputs = [Inputs((Path("x"),), origin=Origin(Path(base))) for base in ("one", "other")]
    runs = run("a", few, 5.0, inputs=inputs[0]), run("b", many, 5.0, inputs=inputs[1])
    found = compared(capsys, *runs)
    assert found["settings"] == {"from": ["one", "other"], "lora_rank": [2, 4]}


def test_an_existing_picture_is_kept(run, capsys, tmp_path):
    folder = run("a", CONFIG, 5.0)
    pictures = [compared(capsys, folder)["picture"] for _ in range(3)]
    assert pictures == ["compare.png", "compare-2.png", "compare-3.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "RUN is missing"), (["nothing"], "holds no run"), (["untrained"], "no figures yet")],
)
def test_bad_arguments_of_compare_are_refused(run, capsys, tmp_path, words, said):
    run("untrained", CONFIG)
    assert main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))
