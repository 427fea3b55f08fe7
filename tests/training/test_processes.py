"""Two processes on this machine, each with two simulated devices, train one model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.training.config import Processes
from tests.properties import tiny

TEXT = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(600))
SETTINGS = (
    "--preset tiny --vocab-size 300 --max-length 32 --embed-dim 32 --num-heads 4 --batch-size 8 "
    "--steps 40 --checkpoint-every 20 --evaluate-every 20 --evaluation-windows 8 --dropout 0.1 "
    "--sample-tokens 12"
).split()
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu", "NPROC": "16"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_processes": 2}, "num_processes and process_id are"),
        ({"coordinator": "auto", "process_id": 0}, "it must be the HOST:PORT"),
        ({"coordinator": "somewhere", "num_processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator": "a:1", "num_processes": 2}, "set both"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "must be in 0 … 1"),
        ({"process_timeout": 0}, "at least 1"),
    ],
)
def test_invalid_process_settings_are_rejected(fields, said):
    with pytest.raises(ValueError, match=said):
        Processes(**fields)


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts `jaxformer train` as one of several processes."""
    (tmp_path / "text.py").write_text(TEXT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def process(place, number, *words, devices=2, slurm=False):
        several = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(number)]
        several += ["--process-id", str(place)]
        cluster = {}
        if slurm:  # the environment that `srun` sets; JAX derives the port from the job number
            several = ["--coordinator", "auto"]
            cluster = {"SLURM_JOB_ID": str(port % 4096), "SLURM_STEP_NODELIST": "localhost"}
            cluster |= {"SLURM_NTASKS": str(number), "SLURM_PROCID": str(place)}
            cluster |= {"SLURM_LOCALID": str(place), "SLURM_STEP_NUM_NODES": "1"}
        flags = f"--xla_force_host_platform_device_count={devices}"
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "jaxformer", "train", *words, *several * (number > 1)],
                cwd=tmp_path,
                env={**os.environ, **QUICK, **cluster, "XLA_FLAGS": flags},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield process
    for each in started:
        each.kill()
        each.communicate()


def ended(*processes):
    """Waits for processes and returns each (status, output)."""
    said = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def figures(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("held_out_loss")) for line in lines]


@pytest.mark.slow
def test_two_processes_train_like_one_and_stop_at_the_same_step(start, tmp_path):
    """A signal to one process stops both processes, and one process resumes the run on one device.

    Both processes save the same step, and the losses equal a run on one device.
    """
    words = ["text.py", *SETTINGS]
    ((status, said),) = ended(start(0, 1, *words, "--out", "one", devices=1))
    assert status == 0, said
    mesh = ["--mesh", "fsdp=2,tensor=2", "--out", "two"]
    both = [start(place, 2, *words, *mesh) for place in (0, 1)]
    metrics = tmp_path / "two/metrics.jsonl"
    while not metrics.exists() and both[0].poll() is None:
        time.sleep(0.01)
    both[1].send_signal(signal.SIGTERM)
    for status, said in ended(*both):
        assert status == 128 + signal.SIGTERM, said
    begun = figures(tmp_path / "two")
    assert 0 < len(begun) < len(figures(tmp_path / "one"))
    words = ["--resume", "--mesh", "data=1", "--out", "two"]
    ((status, said),) = ended(start(0, 1, *words, devices=1))
    assert status == 0, said
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "one"), rel=1e-5)
    samples = [(tmp_path / name / "samples.txt").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        ("prompt", "chosen", "rejected"),
        pytest.param(("prompt", "completion"), marks=pytest.mark.rare),
    ],
)
def test_fine_tuning_in_two_processes_equals_fine_tuning_in_one(form, start, tmp_path):
    """For preferences, all processes score the answers before the first update."""
    model, tokenizer = tiny.build(vocab_size=300, max_length=32), ByteTokenizer.train([TEXT], 300)
    jf.save(tmp_path / "base", model, tiny.weights(model, 0), tokenizer)
    sides = {"prompt": "f{n}(x)", "chosen": "x * {n}", "completion": "x * {n}", "rejected": "y"}
    lines = ({name: sides[name].format(n=n) for name in form} for n in range(40))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = "a.jsonl --init-from base --batch-size 8 --steps 4 --evaluate-every 4".split()
    words += "--learning-rate 1e-3 --warmup-steps 0 --sample-tokens 4".split()
    ((status, said),) = ended(start(0, 1, *words, "--out", "one", devices=1))
    assert status == 0, said
    mesh = ["--mesh", "fsdp=2,tensor=2", "--out", "two"]
    for status, said in ended(*(start(place, 2, *words, *mesh) for place in (0, 1))):
        assert status == 0, said
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--learning-rate", "2e-3"], ["--steps", "41"]])
def test_processes_with_different_settings_are_rejected(start, tmp_path, words):
    """Every process names the flag and both values. Otherwise the processes would wait forever."""
    common = ["text.py", *SETTINGS, "--learning-rate", "1e-3", "--out", "run"]
    for status, said in ended(start(0, 2, *common), start(1, 2, *common, *words)):
        line = said.strip().splitlines()[-1]
        assert status == 2 and words[0] in line and "in process 1" in line, said
    assert not (tmp_path / "run").exists()


@pytest.mark.rare
def test_processes_connect_under_slurm(start, tmp_path):
    words = ["text.py", *SETTINGS, "--steps", "2", "--sample-tokens", "0", "--out", "run"]
    for status, said in ended(*(start(place, 2, *words, slurm=True) for place in (0, 1))):
        assert status == 0, said
    assert len(figures(tmp_path / "run")) == 3


@pytest.mark.slow
def test_an_error_of_process_0_ends_all_processes(start):
    """All processes end within a short time."""
    words = ["no-such-file.py", *SETTINGS, "--out", "run"]
    for status, said in ended(*(start(place, 2, *words) for place in (0, 1))):
        assert status == 2 and "no-such-file.py" in said.splitlines()[-1], said


@pytest.mark.slow
def test_process_exits_if_the_other_processes_do_not_connect(start):
    """The process ends with one line after `--process-timeout`."""
    words = ["text.py", *SETTINGS, "--out", "run", "--process-timeout", "3"]
    for place in (0, 1):
        begun = time.monotonic()
        ((status, said),) = ended(start(place, 2, *words))
        assert status == 2 and "not all processes connected" in said.splitlines()[-1], said
        assert time.monotonic() - begun < 60
