"""Damaged checkpoints: every verb reports the damaged one and uses the one before it."""

import shutil
import warnings

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from tests.cli.conftest import SETTINGS


@pytest.fixture(autouse=True)
def warnings_as_a_person_has_them():
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@pytest.fixture
def older(trained, tmp_path):
    """The run without its newest checkpoint."""
    folder = shutil.copytree(trained, tmp_path / "older")
    shutil.rmtree(folder / "checkpoints/12")
    return folder


@pytest.fixture
def hurt(trained, tmp_path):
    """The run with 64 inverted bytes in its newest parameters."""
    folder = shutil.copytree(trained, tmp_path / "hurt")
    hurt_params(folder / "checkpoints/12")
    return folder


def hurt_params(checkpoint):
    files = [path for path in (checkpoint / "params").rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 2, len(content) // 2 + 64)
    content[middle] = bytes(255 - byte for byte in content[middle])
    path.write_bytes(content)


def said(capsys, words):
    """Returns (standard output, lines on standard error) of a verb that succeeds."""
    assert main(list(map(str, words))) == 0
    out, err = capsys.readouterr()
    return out, err.splitlines()


@pytest.mark.parametrize(
    ("verb", "words"), [("generate", ["--max-new-tokens", "9"]), ("evaluate", [__file__, "--json"])]
)
def test_generate_and_evaluate_name_a_damaged_checkpoint_and_use_the_previous_one(
    older, hurt, verb, words, capsys
):
    found, (warning,) = said(capsys, [verb, hurt, *words])
    assert (found, []) == said(capsys, [verb, older, *words])
    assert warning.startswith(f"jaxformer: warning: {hurt}/checkpoints/12 is damaged: params/")
    assert "the checkpoint of step 10 is used" in warning


@pytest.mark.slow
def test_training_continues_from_the_last_undamaged_checkpoint(older, hurt, capsys):
    """Training continues as if the damaged checkpoint did not exist, and renames it."""
    resume = ["train", "--resume", "--steps", "13", "--out"]
    printed, errors = said(capsys, [*resume, hurt])
    assert f"{hurt}/checkpoints/12 is damaged: params/" in errors[0]
    assert f"{hurt}/checkpoints/12.unreadable" in printed and "step 10" in printed
    said(capsys, [*resume, older])
    losses = [
        [line["loss"] for line in RunFolder(run).read_metrics() if "loss" in line]
        for run in (older, hurt)
    ]
    assert len(losses[0]) == 13 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert Checkpoints(hurt / "checkpoints").steps() == [10, 13]
    expected, found = (jf.load(run).variables for run in (older, hurt))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), expected, found
    )


def test_a_run_with_only_damaged_checkpoints_is_refused(hurt, capsys):
    hurt_params(hurt / "checkpoints/10")
    for words in (["generate", hurt], ["train", "--resume", "--out", hurt, "--steps", "13"]):
        assert main(list(map(str, words))) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert f"{hurt}/checkpoints" in error and "12 is damaged: params/" in error


def test_resume_refuses_run_without_a_complete_checkpoint(trained, tmp_path, capsys):
    """The run has been trained, so its metrics must not be deleted."""
    folder = shutil.copytree(trained, tmp_path / "copy")
    for path in (folder / "checkpoints").glob("*/_CHECKPOINT_METADATA"):
        path.unlink()
    before = RunFolder(folder).metrics.read_bytes()
    assert main(["train", "--resume", "--out", str(folder), "--steps", "13"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"no checkpoint in {folder}/checkpoints can be read" in error
    assert RunFolder(folder).metrics.read_bytes() == before


@pytest.mark.slow
def test_non_finite_parameters_stop_training(corpus, tmp_path, capsys):
    """An update overflows float32: its loss is finite, but the new parameters are not.

    They are not saved, and the message names the last good checkpoint.
    """
    words = ["train", str(corpus), *SETTINGS, "--checkpoint-every", "1", "--out", "run"]
    assert main([*words, "--warmup-steps", "1", "--learning-rate", "3.4e38"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step 2 is not saved: params/" in error and "contains NaN or infinity" in error
    assert f"last good checkpoint is {tmp_path}/run/checkpoints/1" in error
    assert "--learning-rate" in error
