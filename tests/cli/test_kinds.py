"""The same verbs train, resume, score and use every kind of model."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.models.config import KINDS
from jaxformer.models.sizes import describe_sizes
from jaxformer.training.loop import Training
from jaxformer.training.run_folders import read_run
from jaxformer.training.tasks import task_class
from tests.cli.conftest import TEXT
from tests.slow import mostly_rare

pytestmark = pytest.mark.slow

MEASURES = dict.fromkeys(KINDS, "bits_per_byte") | {"encoder": "accuracy"}
MEASURES |= dict.fromkeys(("encoder-decoder", "recurrent-encoder-decoder"), "bleu")
COMMON = (
    "--preset tiny --vocab-size 300 --max-length 32 --embed-dim 16 --num-layers 1 --dropout 0.1 "
    "--steps 6 --evaluate-every 3 --checkpoint-every 3"
).split()

OF_TEXT = "--batch-size 4 --evaluation-windows 4 --sample-tokens 24".split()
OF_PAIRS = "--batch-tokens 96 --evaluation-pairs 3 --gradient-accumulation-steps 2".split()
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture
def inputs(tmp_path):
    """Returns a function from a kind of model to the arguments that name its training data."""
    (tmp_path / "text.py").write_text(TEXT)
    pairs = [
        (f"{a} and {b}", f"{i} + {j}") for i, a in enumerate(NUMBERS) for j, b in enumerate(NUMBERS)
    ]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    return lambda kind: (
        ["--source", "pairs.tsv", *OF_PAIRS] if MEASURES[kind] == "bleu" else ["text.py", *OF_TEXT]
    )


def train(kind, inputs, out, *words):
    return main(["train", "--model", kind, *inputs(kind), *COMMON, "--out", out, *words])


def test_time_limit_of_training_excludes_compilation(inputs, tmp_path, monkeypatch):
    """A pair run compiles a program per width, some of them between updates."""
    with (tmp_path / "pairs.tsv").open("a") as pairs:
        pairs.writelines(f"{f'{a} ' * 8}\t{number}\n" for number, a in enumerate(NUMBERS * 8))
    compile_, clock, compiled = jax.stages.Lowered.compile, time.perf_counter, []

    def slow(lowered, *arguments):
        compiled.append(lowered)
        return compile_(lowered, *arguments)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000 * len(compiled))
    assert train("encoder-decoder", inputs, "run", "--lengths", "2", "--max-minutes", "10") == 0
    metrics = RunFolder("run").read_metrics()
    assert len(compiled) == 2 and metrics[-1]["step"] == 6
    assert max(line.get("seconds", 0) for line in metrics) < 1000


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "encoder-decoder"))
def test_train_prints_the_sizes_of_the_model(kind, inputs, capsys):
    assert train(kind, inputs, "run") == 0
    model = read_run(RunFolder("run"))[1].model
    assert "\n".join(describe_sizes(model)) in capsys.readouterr().out


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "encoder-decoder"))
def test_a_run_interrupted_at_any_step_resumes_exactly(kind, inputs, monkeypatch):
    """Batches, dropout and final parameters are equal bit for bit."""
    assert train(kind, inputs, "whole") == 0
    update = Training._update

    def ending(training, step):
        if training.step == 4:
            raise RuntimeError("ended")
        update(training, step)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_update", ending)
        assert train(kind, inputs, "ended") == 1
    assert main(["train", "--resume", "--out", "ended"]) == 0
    whole, ended = (RunFolder(name).read_metrics() for name in ("whole", "ended"))
    assert [line["step"] for line in whole if "loss" in line] == list(range(1, 7))
    for one, other in zip(whole, ended, strict=True):
        same = [
            line.get(name) for line in (one, other) for name in ("step", "loss", "held_out_loss")
        ]
        assert same[:3] == same[3:]
    assert RunFolder("whole").read_samples() == RunFolder("ended").read_samples()
    params = (jf.load(name).variables for name in ("whole", "ended"))
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "encoder", "encoder-decoder"))
def test_evaluate_on_held_out_data_gives_the_last_scores_of_training_for_every_model_kind(
    kind, inputs, tmp_path, capsys
):
    """`evaluate` scores all held-out data from a file, with the run's seed and settings.

    config.json names the kind of the run.
    """
    words = ["--mask-rate", "0.3"] if kind == "encoder" else []
    assert train(kind, inputs, "run", "--seed", "1", *words) == 0
    folder, measure = RunFolder("run"), MEASURES[kind]
    _, config = read_run(folder)
    task = task_class(config).read(folder, config)
    tokenizer = task.tokenizer
    evaluations = [line for line in folder.read_metrics() if "held_out_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6]
    assert all(measure in line for line in evaluations)
    assert evaluations[0]["scored"] < evaluations[1]["scored"] == task.num_targets
    assert json.loads(folder.config.read_text())["kind"] == kind
    if measure == "bleu":
        pairs = [[tokenizer.decode(side.tolist()) for side in pair] for pair in task.held_out]
        (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
        given = ["--source", "held_out.jsonl"]
    else:
        (ids,) = task.data.held_out_documents
        (tmp_path / "held_out.py").write_text(tokenizer.decode(ids.tolist()))
        given = ["held_out.py"]
    capsys.readouterr()
    assert main(["evaluate", "run", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == task.num_targets
    assert found["loss"] == pytest.approx(evaluations[1]["held_out_loss"], rel=1e-5)
    assert found[measure] == pytest.approx(evaluations[1][measure], rel=1e-4)
    assert main(["evaluate", "run", *given]) == 0
    assert f"{found['loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", mostly_rare(KINDS, "recurrent", "encoder-decoder"))
def test_next_command_printed_by_train_succeeds(kind, inputs, capsys, monkeypatch):
    """The last output line of training is a command. `translate` prints one line per input line."""
    import io
    import shlex

    assert train(kind, inputs, "run") == 0
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if line.startswith("next: "))
    _, verb, *words = shlex.split(command.removeprefix("next: "))
    monkeypatch.setattr("sys.stdin", io.StringIO("one and two\n\nfive and six"))
    assert main([verb, *words]) == 0
    out = capsys.readouterr().out
    if verb == "translate":
        assert out.count("\n") == 3 and out.split("\n")[1] == ""
    elif verb == "fill-mask":
        assert "[MASK] 1: " in out and out.count("%") == 5
    else:
        assert out.startswith(words[1].removeprefix("--prompt="))


def test_saved_model_remembers_the_lowercase_option(inputs, capsys, monkeypatch):
    """A model trained with --lowercase lowers the case of its input, also after saving."""
    import io

    assert train("recurrent-encoder-decoder", inputs, "run", "--lowercase") == 0
    model, variables, tokenizer = jf.load("run")
    jf.save("saved", model, jax.tree.map(lambda x: 3 * x, variables), tokenizer)
    said = []
    for text in ("ONE and Two\n", "one and two\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        capsys.readouterr()
        assert main(["translate", "saved"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != "\n"
    more = ["--out", "more", "--steps", "1"]
    tuning = ["train", "--init-from", "saved", "--source", "pairs.tsv", *more]
    assert main([*tuning, "--no-lowercase"]) == 2
    assert "the tokenizer of" in capsys.readouterr().err and not Path("more").exists()
    for folder in ("run", "saved"):
        assert main(["evaluate", folder, "--source", "pairs.tsv", "--json"]) == 0
        assert "case:lc" in json.loads(capsys.readouterr().out)["signature"]


def test_translate_states_the_number_of_an_invalid_line(inputs, tmp_path, capsys, monkeypatch):
    """The lines before it are translated. A carriage return alone ends no line."""
    import io

    assert train("recurrent-encoder-decoder", inputs, "run") == 0
    for text, lines, message in (
        (b"one\rtwo\nthree\r\n", 2, ""),
        (b"one\ntwo\n" + b"three " * 40 + b"\nfour\n", 2, "line 3 has"),
        (b"one\n\xff\nthree\n", 0, "line 2 of standard input is not UTF-8 text"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        capsys.readouterr()
        assert main(["translate", "run"]) == (2 if message else 0)
        said, error = capsys.readouterr()
        assert said.count("\n") == lines and message in error and error.count("\n") <= 1
        (tmp_path / "in.en").write_bytes(text)
        (tmp_path / "first.en").write_text("one\nthree\n")
        assert main(["translate", "run", "first.en", "in.en"]) == (2 if message else 0)
        said, error = capsys.readouterr()
        assert said.count("\n") == 2 + lines
        assert (
            message.replace("line 3", "line 3 of in.en").replace("standard input", "in.en") in error
        )


def test_evaluate_excludes_targets_longer_than_max_length(inputs, tmp_path, capsys):
    assert train("encoder-decoder", inputs, "run") == 0
    (tmp_path / "long.tsv").write_text(f"one and two\t1 + 2\nthree\t{'4 + ' * 60}\n")
    capsys.readouterr()
    assert main(["evaluate", "run", "--source", "long.tsv"]) == 0
    said = capsys.readouterr()
    assert "1 of 2 targets are longer than max_length (32)" in said.err and "nan" not in said.out


def test_error_explains_why_a_command_does_not_support_a_model(inputs, capsys):
    assert train("encoder", inputs, "run") == 0
    capsys.readouterr()
    for words, message in (
        (["generate", "run"], "is not autoregressive"),
        (["translate", "run"], "translation needs an encoder-decoder"),
        (["evaluate", "run", "--source", "pairs.tsv"], "give FILE to score it"),
        (["fill-mask", "run", "--text", "nothing hidden"], "it must contain at least one [MASK]"),
        (["train", "--resume", "--out", "run", "--mask-rate", "0.3"], "--mask-rate is 0.3"),
        (["train", "--resume", "--out", "run", "--model", "decoder"], "run has --model encoder"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
