"""Bad input gives one line with the argument, its value and the accepted values, and status 2."""

import os
import shutil
import subprocess
import sys

import pytest

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.cli import main
from tests.cli.conftest import SETTINGS

HUGE = "1" + 20 * "0"  # larger than any 64-bit integer


def refused(capsys, words, *named, status=2):
    """Checks that a command fails with one line on standard error that contains all of `named`.

    Returns its standard output.
    """
    assert main(list(map(str, words))) == status
    printed, said = capsys.readouterr()
    assert said.count("\n") == 1, said
    for internal in ("Traceback", "Arguments", "<class"):
        assert internal not in said, said
    for name in named:
        assert str(name) in said, said
    return printed


def files_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TEXTS = {
    "empty.txt": (b"", "empty"),
    "binary.bin": (b"\x00\x01\x02" * 100, "NUL"),
    "latin.txt": (b"caf\xe9 " * 1000, "UTF-8"),
    "short.txt": (b"short", "window"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_train_refuses_files_that_are_empty_or_too_short_or_not_utf8_text(name, tmp_path, capsys):
    content, complaint = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    refused(capsys, ["train", name], complaint)
    assert not (tmp_path / "runs").exists()


def test_train_refuses_missing_text(tmp_path, capsys):
    refused(capsys, ["train", "nowhere.txt"], "nowhere.txt", "no such file")
    (tmp_path / "folder").mkdir()
    refused(capsys, ["train", "folder"], "folder", "no UTF-8 text")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--preset", "huge"], ["preset", "huge", "stdlib"]),
        (["--colour", "red"], ["--colour"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps", "0"], ["steps", "0", "at least 1"]),
        (["--embed-dim", "100", "--num-heads", "3"], ["embed_dim", "100", "3"]),
        (["--num-heads", "4", "--num-kv-heads", "3"], ["num_kv_heads", "3", "4"]),
        (["--dropout", "1.5"], ["dropout", "1.5", "[0, 1)"]),
        (["--vocab-size", "10"], ["vocab_size", "10", "257"]),
        (["--activation", "tan"], ["activation", "tan", "relu"]),
        (["--learning-rate", "-1"], ["learning_rate", "-1", "above 0"]),
        ("--window-length 4096 --max-length 128".split(), ["window_length", "4096", "max_length"]),
        (
            "--preset tiny --window-length 32 --max-length 64".split(),
            ["window_length", "32", "learned", "64"],
        ),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--seed", HUGE], ["seed", HUGE, "0 … 4294967295"]),
        (["--seed", "4294967296"], ["seed", "4294967296", "0 … 4294967295"]),
        (["--batch-size", HUGE], ["batch_size", HUGE, "at most 2147483647"]),
        (["--vocab-size", HUGE], ["vocab_size", HUGE, "at most 2147483647"]),
        (["--prefix", "3"], ["prefix", "3", "must be 0"]),
        (["--sample-tokens", "-1"], ["sample_tokens", "-1", "at least 0"]),
        (["--max-length", "1"], ["max_length", "1", "at least 2"]),
        (["--beta2", "1"], ["beta2", "1", "[0, 1)"]),
        (["--weight-decay", "nan"], ["weight_decay", "nan"]),
        (["--weight-decay", "inf"], ["weight_decay", "inf", "finite"]),
        (["--learning-rate", "inf"], ["learning_rate", "inf", "finite"]),
        ([""], ["an argument is an empty string"]),
        (["--mesh", "fsdp"], ["--mesh", "'fsdp'", "NAME=SIZE"]),
        (["--mesh", "fsdp=x"], ["--mesh", "'fsdp=x'", "whole number"]),
        (["--resume"], ["--resume", "below runs", "contains no run"]),
        (["--resume", "--out", "nowhere"], ["nowhere", "is not a run"]),
    ],
)
def test_train_refuses_invalid_settings(words, named, tmp_path, capsys):
    refused(capsys, ["train", *words], *named)
    assert not (tmp_path / "runs").exists()


def test_train_does_not_overwrite_a_run_folder(trained, corpus, capsys):
    before = files_below(trained)
    refused(capsys, ["train", corpus, "--out", trained], trained, "--resume", "--out")
    assert files_below(trained) == before


def test_resuming_with_other_settings_is_refused(trained, capsys):
    before = files_below(trained)
    resume = ["train", "--resume", "--out", trained]
    refused(capsys, [*resume, "--embed-dim", "64"], "embed-dim", "64", "32", "--steps", "--remat")
    refused(capsys, [*resume, "other.txt"], "text", trained)
    refused(capsys, [*resume, "--steps", "5"], "--steps is 5", trained, "at step 12")
    assert files_below(trained) == before


def test_train_does_not_write_into_a_folder_with_other_files(corpus, tmp_path, capsys):
    (tmp_path / "documents.txt").write_text("mine")
    refused(capsys, ["train", corpus, "--out", tmp_path], tmp_path, "contains files")
    assert files_below(tmp_path) == {tmp_path / "documents.txt": b"mine"}


def test_train_does_not_write_into_a_folder_that_another_process_created(
    corpus, tmp_path, capsys, monkeypatch
):
    """The folder is free at first and taken while the text is read: the other run is unchanged."""
    from jaxformer.training.tasks.text import TextTask

    gather, taken = TextTask.gather, tmp_path / "runs/functions/config.json"

    def slowly(*arguments):
        taken.parent.mkdir(parents=True)
        taken.write_text("theirs")
        return gather(*arguments)

    monkeypatch.setattr(TextTask, "gather", slowly)
    refused(capsys, ["train", corpus], "runs/functions", "another process")
    assert files_below(tmp_path) == {taken: b"theirs"}


def test_failed_start_of_training_leaves_no_run_folder(tmp_path, capsys):
    """The text has enough bytes for a window, but not enough tokens. That is known only later."""
    (tmp_path / "text.txt").write_text("the end\n" * 40)
    words = ["train", "text.txt", "--window-length", "128", "--out", "run"]
    refused(capsys, words, "tokens, too few for one window of 128", "--window-length")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_failed_start_of_training_keeps_an_existing_folder(kind, tmp_path, capsys):
    """An empty folder that the user created for the run stays, and the message is the same."""
    (tmp_path / "text.txt").write_text("the end\n" * 40)
    (tmp_path / "there").mkdir()
    if kind == "a link":
        (tmp_path / "link").symlink_to(tmp_path / "there")
    out = "link" if kind == "a link" else "there"
    words = ["train", "text.txt", "--window-length", "128", "--out", out]
    for _ in range(2):
        refused(capsys, words, "tokens, too few for one window of 128")
    assert (tmp_path / out).is_dir() and not list((tmp_path / "there").iterdir())


def test_training_restarts_after_a_kill_before_config_json_is_written(tmp_path, capsys):
    """Its leftovers are accepted; a tokenizer.json without a lock may be the user's own file."""
    (tmp_path / "text.txt").write_text("the end\n" * 40)
    words = ["train", "text.txt", "--window-length", "128", "--out", "run"]
    for left in (["lock"], ["lock", "tokenizer.json", "config.json.99.tmp"]):
        (tmp_path / "run").mkdir(exist_ok=True)
        for name in left:
            (tmp_path / "run" / name).touch()
        refused(capsys, words, "tokens, too few for one window of 128")  # same as without leftovers
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run/tokenizer.json").write_text("mine")
    refused(capsys, words, "run contains files, but not a run")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "inf"], ["temperature", "inf"]),
        (["--top-p", "0"], ["top_p", "0", "(0, 1]"]),
        (["--top-p", "1.5"], ["top_p", "1.5", "(0, 1]"]),
        (["--top-k", "-3"], ["top_k", "-3"]),
        (["--min-p", "2"], ["min_p", "2", "[0, 1]"]),
        (["--max-new-tokens", "0"], ["max-new-tokens", "0"]),
        (["--max-new-tokens", "1000"], ["max-new-tokens", "1000", "32"]),
        (["--max-new-tokens", HUGE], ["max-new-tokens", HUGE, "32"]),
        (["--seed", HUGE], ["seed", HUGE, "0 … 4294967295"]),
        (["--seed", "-1"], ["seed", "-1", "0 … 4294967295"]),
    ],
)
def test_generate_refuses_invalid_sampling_settings(trained, words, named, capsys):
    assert refused(capsys, ["generate", trained, "--prompt", "def", *words], *named) == ""


def test_commands_reject_missing_runs_and_files(trained, tmp_path, capsys):
    refused(capsys, ["generate", "nowhere"], "nowhere")
    refused(capsys, ["generate", tmp_path], tmp_path, "config.json")
    refused(capsys, ["evaluate", trained, "nowhere.txt"], "nowhere.txt")
    refused(capsys, ["evaluate", trained], "FILE")
    refused(
        capsys,
        ["evaluate", trained, __file__, "--beam-width", "2"],
        "--beam-width",
        "needs --source",
    )
    refused(capsys, ["evaluate", trained, __file__, "--target", "x"], "--target", "--source")
    refused(
        capsys,
        ["evaluate", trained, "--source", "x", "--stride", "2"],
        "--stride",
        "needs no --source",
    )
    refused(capsys, ["evaluate", trained, __file__, "--stride", "99"], "stride", "99")
    refused(capsys, ["verify", "nowhere"], "nowhere", "does not exist")
    refused(capsys, ["verify", trained, "--length", "7"], "length is 7", "between 12 and 32")
    refused(capsys, ["verify", trained, "--seed", "-1"], "seed is -1")
    refused(capsys, ["verify", trained, "--seed", HUGE], f"seed is {HUGE}")
    refused(capsys, ["verify", trained, "--length", HUGE], f"length is {HUGE}")
    refused(capsys, ["evaluate", trained, __file__, "--stride", HUGE], "stride", HUGE)
    assert not (trained / "certificate.json").exists()
    refused(capsys, ["fly"], "fly", "train")


def test_checkpoints_with_parameters_of_a_wrong_shape_are_refused(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"mlp_dim": null', '"mlp_dim": 96'))
    refused(capsys, ["generate", copy], "blocks/feedforward", "96", "128")


def test_commands_reject_run_config_with_an_unknown_field(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"mlp_dim"', '"mlp_width"'))
    refused(capsys, ["generate", copy], "config.json", "mlp_width")


def test_commands_reject_run_config_with_missing_keys(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "config.json").write_text('{"format": 3}')
    refused(capsys, ["generate", copy], "config.json", "'model'")
    (copy / "config.json").write_text('{"format": 3, "model": {}, "training": {}, "text": []}')
    resumed = ["train", "--resume", "--out", copy]
    refused(capsys, resumed, "config.json", '"training" lacks the key "execution"')


def test_resume_rejects_a_changed_tokenizer(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    ByteTokenizer.train(["another text altogether"] * 9, 300).save(copy / "tokenizer.json")
    words = ["train", "--resume", "--out", copy, "--steps", "14"]
    refused(capsys, words, "train.bin", "a different tokenizer")


@pytest.mark.slow
def test_a_full_disk_stops_training_and_names_the_last_checkpoint(
    corpus, tmp_path, capsys, monkeypatch
):
    """The disk is full at the second checkpoint: the message names the first, which is complete."""
    usage, asked = shutil.disk_usage(tmp_path), []

    def fills_up(folder):
        asked.append(folder)
        return usage if len(asked) == 1 else usage._replace(free=1000)

    words = ["train", corpus, *SETTINGS, "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", fills_up)
        refused(capsys, words, "disk is full", "run/checkpoints/5", status=1)
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [5]


def test_characters_that_a_terminal_cannot_encode_are_replaced():
    """Characters outside the terminal's encoding are shown as escapes."""
    command = [sys.executable, "-m", "jaxformer", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and "jaxformer VERB \\u2026" in run.stdout


def test_debug_flag_prints_a_traceback(capsys):
    with pytest.raises(ValueError, match="nowhere"):
        main(["generate", "nowhere", "--debug"])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_error_messages_do_not_depend_on_the_terminal_encoding(encoding, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command = [sys.executable, "-m", "jaxformer", "train"]
    for words, said in (
        (["--steps", "0"], "steps is 0; it must be at least 1"),
        (["--steps", "x"], "--steps is 'x'; it must be a whole number or None"),
    ):
        run = subprocess.run([*command, *words], capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (2, f"jaxformer: {said}\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--preset", "huge"], ["preset", "huge", "gpt2-124m"]),
        (["--mesh", "fsdp=8"], ["--mesh", "--preset"]),
        (["--decode"], ["--decode", "--preset"]),
        (["--preset", "tiny", "--model", "poem"], ["model", "poem", "recurrent"]),
        (["--preset", "tiny", "--target", "gpu:8"], ["target", "gpu:8", "gpu:h100:8", "cpu:8"]),
        (["--preset", "tiny", "--length", "65"], ["length", "65", "at most 64"]),
        (["--preset", "tiny", "--batch-size", "0"], ["batch_size", "0", "at least 1"]),
        (["--preset", "tiny", "--target", "cpu:1", "--mesh", "fsdp=3"], ["fsdp=3", "there are 1"]),
        (
            ["--preset", "tiny", "--target", "cpu:1", "--mesh", "fsdp=0"],
            ["fsdp", "0", "at least 1"],
        ),
        (["--preset", "tiny", "--target", "cpu:1", "--mesh", "model=1"], ["the axes are data"]),
        (["--preset", "tiny", "--model", "encoder", "--decode"], ["not autoregressive"]),
        (["--preset", "tiny", "--target", "gpu:h100:64"], ["gpu:h100:64", "at most 8"]),
    ],
)
def test_invalid_doctor_arguments_are_refused(words, named, capsys):
    refused(capsys, ["doctor", *words], *named)
