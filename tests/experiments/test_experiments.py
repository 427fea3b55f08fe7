"""The experiments: their data, their error messages and their analysis functions."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def run(*arguments, cwd, script="translate.py"):
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_held_out_phrases_never_occur_in_training():
    """Not as single phrases either. A chain of phrases is translated consistently on both sides."""
    pytest.importorskip("babel")
    from phrases import LONGEST, phrases, strung

    train, held_out = phrases(7000, seed=0)
    assert (train, held_out) == phrases(7000, seed=0)
    for seen, asked in zip(train, held_out, strict=True):  # for each kind of phrase
        assert len(asked) > 3 and not set(dict(seen)) & set(dict(asked))
    french = {english: french for asked in held_out for english, french in asked}
    for english, translated, count in strung(held_out, 200, seed=1, mostly_short=False):
        assert 1 <= count <= LONGEST
        if count == 1:
            assert french[english] == translated
    counts = [count for *_, count in strung(train, 2000, seed=1, mostly_short=True)]
    assert counts.count(1) > 3 * counts.count(LONGEST) > 0


REFUSED = {
    "a has 2 lines and b has 1": (
        ("translate", "--source", "a", "--target", "a", "--test-source", "a", "--test-target", "b")
    ),
    "c: line 2 is empty": (
        ("translate", "--source", "a", "--target", "a", "--test-source", "a", "--test-target", "c")
    ),
    "give all of --source, --target, --test-source and --test-target, or none of them": (
        ("translate", "--source", "a")
    ),
    "--vocab-size needs --source": ("translate", "--vocab-size", "300"),
    "--max-minutes is inf; it must be above 0 and finite": ("translate", "--max-minutes", "inf"),
    "--beam-width: '0' is not accepted; it must be a whole number of at least 1": (
        ("translate", "--beam-width", "0")
    ),
    "--steps: '3' is not accepted": ("zoo", "--steps", "3"),
    "--rounds: '0' is not accepted": ("bench_translate", "--rounds", "0"),
    "--batch-sizes cannot be used with --capacity": (
        "bench_decode",
        "--capacity",
        "--batch-sizes",
        "8",
    ),
    "--before: 'nowhere' is not accepted": ("bench_attention", "--before", "nowhere"),
    "--seed: 'x' is not accepted; it must be a whole number": ("fill_in", "--seed", "x"),
    "--picture: 'none/zoo.png' is not accepted": ("zoo", "--picture", "none/zoo.png"),
    "--picture: 'a' is not accepted; it must end in .png": ("build_up", "--picture", "a"),
    "nowhere: no such file": ("build_up", "nowhere"),
    "the training or held-out text has 1 tokens": ("shakespeare", "b"),
    "nowhere does not exist": ("heads", "nowhere"),
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "one\ntwo\n", "b": "un\n", "c": "un\n\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("message", REFUSED)
def test_experiment_script_prints_one_line_and_exits_with_status_2_on_bad_input(
    texts, message, monkeypatch, capsys
):
    """The script prints only the message and creates no file."""
    import record

    script, *arguments = REFUSED[message]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit, match="2"):
        record.run(importlib.import_module(script).main)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert {path.name for path in texts.iterdir()} == {"a", "b", "c"}


def test_missing_python_package_is_reported_before_training(texts, monkeypatch, capsys):
    """The error comes immediately, not after an hour of training."""
    import record

    monkeypatch.setattr(record, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["translate"])
    with pytest.raises(SystemExit, match="2"):
        record.run(importlib.import_module("translate").main)
    assert "babel is not installed; run: pip install" in capsys.readouterr().err


def test_experiment_script_exits_with_status_2_on_error(texts):
    done = run("--vocab-size", "300", cwd=texts)
    assert done.returncode == 2 and done.stderr == "translate.py: --vocab-size needs --source\n"


def test_attention_heads_are_scored_on_held_out_text_of_their_run(tmp_path):
    """By default that is the held-out part of the run's text. The name of the text is returned."""
    import heads

    from jaxformer.artifacts.run import RunFolder
    from jaxformer.training.config import Inputs
    from jaxformer.training.data.corpus import read_documents
    from jaxformer.training.presets import training_preset
    from jaxformer.training.run_folders import write_run
    from jaxformer.training.screen import Screen
    from jaxformer.training.tasks.text import TextTask, read_data

    for name in ("tinyshakespeare.txt", "other.txt"):
        (tmp_path / name).write_text(f"Of {name}, some lines\n" * 400)
    own, other = tmp_path / "tinyshakespeare.txt", tmp_path / "other.txt"
    folder, config = RunFolder(tmp_path / "run"), training_preset("tiny", "decoder")
    folder.path.mkdir()
    TextTask.write(folder, config, read_documents([own]), Screen(quiet=True))
    write_run(folder, Inputs((own,)), config)
    tokenizer = read_data(folder).tokenizer
    name, ids = heads.held_out_ids([], folder.path, tokenizer)
    assert name == "tinyshakespeare" and tokenizer.decode(ids.tolist()) in own.read_text()
    name, ids = heads.held_out_ids([other], folder.path, tokenizer)
    assert name == "other" and tokenizer.decode(ids.tolist()) in other.read_text()


def test_experiment_script_prints_the_path_of_its_picture(monkeypatch, capsys, tmp_path):
    """Every experiment announces its picture through `record.run`."""
    import record

    def main():
        parser = record.Parser("Draws.")
        parser.add_argument("--picture", type=record.picture, default="drawn.png")
        parser.parse_args([])

    monkeypatch.setattr(record.Parser, "picture", None)
    record.run(main)
    assert capsys.readouterr().err == "picture: drawn.png\n"


def test_experiment_function_runs_in_its_own_process_and_environment():
    from alone import alone

    name = "EXPERIMENT_SETTING"
    assert alone(os.getpid) != os.getpid()
    assert alone(os.getenv, name, environment={name: "on"}) == "on" and name not in os.environ


def test_peak_memory_includes_deleted_arrays():
    from alone import peak_memory

    before, size = peak_memory(), 1 << 28
    assert b"\1" * size
    assert before + size // 2 < peak_memory()
