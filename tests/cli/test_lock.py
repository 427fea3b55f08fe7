"""Only one process may train in a run folder; any number of processes may read it."""

import shutil
import subprocess
import sys

import pytest

from jaxformer.cli import main
from jaxformer.training import run_folders

ENDLESS = "--steps 1000000 --checkpoint-every 1000000 --evaluate-every 1000000".split()


@pytest.fixture
def start():
    """Starts `jaxformer train` and kills the process at the end of the test."""
    started = []

    def start(*words):
        command = [sys.executable, "-m", "jaxformer", "train", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_process_cannot_train_in_a_locked_run_folder(trained, tmp_path, start, capsys):
    """The refusal is immediate and leaves the run unchanged. A kill releases the lock."""
    folder = shutil.copytree(trained, tmp_path / "run")
    first = start("--resume", "--out", folder, *ENDLESS)
    assert first.stdout.readline().startswith("run folder:")
    second = start("--resume", "--out", folder, "--steps", "77")
    said, complaint = second.communicate(timeout=60)
    assert (second.returncode, said) == (2, "")
    assert complaint.count("\n") == 1 and f"another process is training in {folder}" in complaint
    assert '"steps": 77' not in (folder / "config.json").read_text()
    assert main(["generate", str(folder), "--max-new-tokens", "1"]) == 0  # reading needs no lock
    assert first.poll() is None
    first.kill()
    first.communicate()
    assert main(["train", "--resume", "--out", str(folder), "--steps", "12"]) == 0
    assert "another process" not in capsys.readouterr().err


def test_train_warns_if_run_folder_cannot_be_locked(trained, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setattr(run_folders, "fcntl", None)
    assert main(["train", "--resume", "--out", str(folder)]) == 0
    assert f"this system cannot lock {folder}" in capsys.readouterr().out
