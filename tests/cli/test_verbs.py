"""Tests of the verbs on a trained run, from its files to its certificate."""

import json
import math
import shutil
from pathlib import Path

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.training.tasks.next_tokens import first_words
from tests.cli.conftest import SETTINGS


def test_run_folder_contains_metrics_and_picture_and_samples_and_checkpoints(trained):
    folder = RunFolder(trained)
    lines = folder.read_metrics()
    losses = [line for line in lines if "loss" in line]
    assert [line["step"] for line in losses] == list(range(1, 13))
    assert all({"loss", "learning_rate"} <= line.keys() for line in losses)
    speeds = [line["tokens_per_second"] for line in losses if "tokens_per_second" in line]
    assert speeds and min(speeds) > 0
    evaluations = [line for line in lines if "held_out_loss" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert all("bits_per_byte" in line for line in evaluations)
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert folder.samples.read_text().count("---- step") == 2
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["10", "12"]
    assert folder.tokenizer.exists()


def test_evaluate_on_the_held_out_text_gives_the_last_bits_per_byte_of_training(
    trained, tmp_path, capsys
):
    """`evaluate` scores the same held-out bytes from a text file."""
    folder = RunFolder(trained)
    checkpoint = jf.load(trained)
    ids = [int(i) for i in _tokens(folder.held_out_tokens)]
    text = checkpoint.tokenizer.decode(ids)
    (tmp_path / "held_out.py").write_text(text)
    assert main(["evaluate", str(trained), "held_out.py", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    trained_score = [line for line in folder.read_metrics() if "bits_per_byte" in line][-1]
    assert score["bits_per_byte"] == pytest.approx(trained_score["bits_per_byte"], rel=1e-4)
    assert score["bytes"] == len(text.encode())
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    assert score["gzip"] > 0 and score["xz"] > 0


@pytest.mark.slow
def test_next_command_printed_by_train_succeeds(corpus, tmp_path, capsys):
    """The command quotes the run's name and has a prompt from the run's text.

    A message states the vocabulary if the text yields fewer tokens than configured.
    """
    import shlex

    words = [*SETTINGS, "--steps", "1", "--vocab-size", "9000", "--out", "it's a run"]
    assert main(["train", str(corpus), *words]) == 0
    said = capsys.readouterr().out
    size = jf.load("it's a run").tokenizer.vocab_size
    assert f"vocabulary: {size:,} tokens (the text is too short for the vocab_size 9,000)\n" in said
    command = next(line for line in said.splitlines() if line.startswith("next: "))
    _, verb, *words = shlex.split(command.removeprefix("next: "))
    assert main([verb, *words, "--max-new-tokens", "1"]) == 0
    prompt = words[1].removeprefix("--prompt=")
    assert len(prompt) >= 5 and prompt in corpus.read_text()
    assert capsys.readouterr().out.startswith(prompt)


@given(text=st.text(), room=st.integers(1, 40))
@example(text="\n\n  A long first line of many words\nand more", room=40)
@example(text="-x 猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫猫\x1b[0m", room=9)
def test_default_prompts_are_short_pieces_of_the_training_text(text, room):
    """It is one printable line that fits into the model's context."""
    prompt = first_words(text, lambda words: len(words.encode()) < room)
    assert prompt in text and prompt.isprintable()
    assert len(prompt) <= 20 and (len(prompt.encode()) < room or not prompt)


def test_every_evaluation_uses_the_same_windows(trained):
    """The last evaluation scores them besides the whole text, so all points of the curve match.

    Scoring the windows again with the loaded model gives the same figures.
    """
    from jaxformer.training.evaluate import evaluate_documents
    from jaxformer.training.tasks.text import read_data

    folder = RunFolder(trained)
    data, (model, variables, _) = read_data(folder), jf.load(trained)
    first, last = (line for line in folder.read_metrics() if "held_out_loss" in line)
    assert first["scored"] == last["part_scored"] < last["scored"] == data.held_out.num_targets
    score = evaluate_documents(
        model,
        variables,
        data.held_out_documents,
        data.held_out.num_bytes,
        windows=4,
        batch_size=4,
    )
    assert score.tokens == last["part_scored"]
    assert last["part_loss"] == pytest.approx(score.loss, rel=1e-5)
    assert last["part_bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-5)


def test_evaluate_shows_progress_on_a_terminal(trained, corpus, capsys, monkeypatch):
    """Progress goes to standard error; with --json there is none."""
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")  # makes rich treat its output as a terminal
    assert main(["evaluate", str(trained), str(corpus)]) == 0
    said, shown = capsys.readouterr()
    assert "scoring" in shown and "tokens" in shown and "scoring" not in said
    assert main(["evaluate", str(trained), str(corpus), "--json"]) == 0
    said, shown = capsys.readouterr()
    assert json.loads(said) and shown == ""


def _tokens(path):
    from jaxformer.training.data.tokens import open_tokens

    return open_tokens(path).ids


@pytest.mark.slow
def test_generate_gives_the_same_text_for_the_same_seed(trained, capsys):
    def sample(seed):
        arguments = ["--prompt", "def f", "--max-new-tokens", "12", "--seed", str(seed)]
        assert main(["generate", str(trained), *arguments]) == 0
        return capsys.readouterr().out

    assert main(["generate", str(trained), "--prompt", "def f"]) == 0  # limited by max_length
    assert capsys.readouterr().out.startswith("def f")
    first = sample(1)
    assert first.startswith("def f")
    assert len(first) > len("def f\n")
    assert sample(1) == first
    assert any(sample(seed) != first for seed in (2, 3, 4))


def test_training_run_without_name_gets_the_next_free_folder(tmp_path):
    from jaxformer.artifacts.files import next_free

    assert next_free(tmp_path, "stdlib").name == "stdlib"
    for expected in ("stdlib", "stdlib-2", "stdlib-3"):
        path = next_free(tmp_path, "stdlib")
        assert path.name == expected
        path.mkdir()


@pytest.mark.slow
def test_resuming_a_finished_run_for_more_steps_keeps_the_metrics(trained, tmp_path):
    import shutil

    folder = shutil.copytree(trained, tmp_path / "copy")
    before = (folder / "metrics.jsonl").read_text()
    assert main(["train", "--resume", "--out", str(folder), "--steps", "14"]) == 0
    after = (folder / "metrics.jsonl").read_text()
    assert after.startswith(before)
    assert [line["step"] for line in RunFolder(folder).read_metrics()][-1] == 14


@pytest.mark.slow
def test_resuming_a_run_that_stopped_before_its_final_evaluation_evaluates_it_once(
    trained, tmp_path
):
    """A run stopped at its last step without a final score is scored once when it is resumed.

    Resuming it again does not score it a second time.
    """
    import shutil

    folder = RunFolder(shutil.copytree(trained, tmp_path / "copy"))
    lines = folder.metrics.read_text().splitlines(keepends=True)
    final = json.loads(lines.pop())
    folder.metrics.write_text("".join(lines))
    for _ in range(2):
        assert main(["train", "--resume", "--out", str(folder.path)]) == 0
        scores = [line for line in folder.read_metrics() if "bits_per_byte" in line]
        assert [line["step"] for line in scores] == [6, 12]
        assert scores[-1] == pytest.approx(final, rel=1e-6)


@pytest.mark.slow
def test_a_profile_is_written_into_the_run_folder(corpus, tmp_path, capsys):
    """Where a file of this name stands, the run ends with an error, and the file remains."""
    words = ["train", str(corpus), *SETTINGS, "--out", "run", "--profile"]
    assert main(words) == 0
    assert f"profile: {Path('run/profile')}" in capsys.readouterr().out
    assert list(Path("run/profile").rglob("perfetto_trace.json.gz"))
    shutil.rmtree("run/profile")
    Path("run/profile").write_text("mine")
    assert main(["train", "--resume", "--out", "run", "--steps", "24", "--profile"]) == 2
    assert "profile is a file, but the profile needs a folder" in capsys.readouterr().err
    assert Path("run/profile").read_text() == "mine"


def test_train_prints_paths_and_samples_without_parsing_markup(trained, tmp_path, capsys):
    """Neither printing nor drawing interprets them as markup, emoji or mathematics."""
    import shutil

    folder = RunFolder(shutil.copytree(trained, tmp_path / "$x_{$ :smile:"))
    sample = "y = a[n] + c[key]  # [/bold] :smile:\n\tindented" + " long" * 50
    folder.samples.write_text(f"---- step 6\nolder\n---- step 12\n{sample}\n")
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:-1]))  # so that the run is scored and drawn again
    words = ["train", "--resume", "--out", str(folder.path), "--sample-tokens", "0"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"run folder: {folder.path}   documents: {folder.documents}\n" in said
    assert f"a sample:\n{sample}\npicture: {folder.picture}" in said


@pytest.mark.slow
def test_verify_prints_and_stores_which_properties_hold(trained, tmp_path, capsys, monkeypatch):
    """The status is 0 if all properties hold, else 1; the output names the failed property."""
    import shutil

    from jaxformer.functional.attention.masks import Causal
    from jaxformer.verify import certificate as room

    folder = shutil.copytree(trained, tmp_path / "copy")
    cheap, causal = ({name: room.PROPERTIES[name]} for name in ("deterministic", "causal"))
    monkeypatch.setattr(room, "PROPERTIES", cheap)
    assert main(["verify", str(folder), "--length", "16", "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate == json.loads((folder / "certificate.json").read_text())
    assert certificate["holds"] and len(certificate["properties"]) == 1
    assert (folder / "certificate.png").read_bytes().startswith(b"\x89PNG")

    def sees_the_next(self, query, key):
        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None] + 1

    monkeypatch.setattr(Causal, "__call__", sees_the_next)
    monkeypatch.setattr(room, "PROPERTIES", causal)
    jax.clear_caches()
    assert main(["verify", str(folder), "--length", "16"]) == 1
    said = capsys.readouterr().out
    assert "FAILS  causal" in said and "layer 0" in said and "0 of 1 properties hold" in said
    assert not json.loads((folder / "certificate.json").read_text())["holds"]
    jax.clear_caches()


@pytest.mark.slow
def test_verify_confirms_all_properties_of_a_trained_model(trained, tmp_path, capsys):
    import shutil

    folder = shutil.copytree(trained, tmp_path / "copy")
    assert main(["verify", str(folder), "--length", "16", "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["holds"] and len(certificate["properties"]) == 10


@pytest.mark.slow
def test_verify_computes_a_bfloat16_run_in_float32(trained, tmp_path, capsys, monkeypatch):
    """It checks two properties that the rounding of bfloat16 would break."""
    import shutil

    from jaxformer.verify import certificate as room

    folder = shutil.copytree(trained, tmp_path / "copy")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    assert jf.load(folder).model.config.dtype == "bfloat16"
    rounded = {name: room.PROPERTIES[name] for name in ("cached = full", "jitted = eager")}
    monkeypatch.setattr(room, "PROPERTIES", rounded)
    assert main(["verify", str(folder), "--length", "12"]) == 0
    said = capsys.readouterr().out
    assert said.count("; in float32\n") == 2 and "2 of 2 properties hold" in said


def test_help_does_not_import_jax():
    import subprocess
    import sys

    code = (
        "import sys; import jaxformer as jf; from jaxformer.cli import main; dir(jf)\n"
        "for words in (['--help'], ['train', '--help'], ['verify', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
