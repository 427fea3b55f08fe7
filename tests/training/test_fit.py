"""Runs with a user's objective: resuming, meshes, and errors before anything is computed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.run import RunFolder
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.batch import Batch, Share
from jaxformer.training.config import MeshSizes, OptimizerConfig, RunConfig, TextTraining
from jaxformer.training.fit import fit
from jaxformer.training.objectives import CrossEntropy, Objective, Sums
from jaxformer.training.run_folders import newest_unfinished, read_run
from jaxformer.training.tasks.own_batches import NumberedBatches
from tests.errors import error_of

MODEL = jf.DecoderConfig(
    vocab_size=16, max_length=8, num_layers=1, embed_dim=16, num_heads=2, dropout=0.1
)
CONFIG = RunConfig(
    MODEL, optimizer=OptimizerConfig(learning_rate=1e-2), steps=12, checkpoint_every=5, keep=9
)
CONFIG = replace(CONFIG, evaluate_every=6)


class Preferences(NamedTuple):
    """Pairs of rows, the first of which is preferred."""

    chosen: jax.Array
    rejected: jax.Array
    weights: jax.Array


@dataclass(frozen=True)
class Preferred(Objective[Preferences]):
    """The log probability that the model gives to the preferred row of each pair."""

    batch_type = Preferences
    beta: float = 0.1

    def count(self, batch):
        return batch.weights.sum()

    def loss(self, model, params, batch, key):
        def log_probs(rows):
            logits = model.apply({"params": params}, rows[:, :-1], rngs=rngs)
            return -token_losses(logits, rows[:, 1:]).sum(axis=-1)

        rngs = {} if key is None else {"dropout": key}
        margin = self.beta * (log_probs(batch.chosen) - log_probs(batch.rejected))
        losses = -jax.nn.log_sigmoid(margin) * batch.weights
        return Sums(losses.sum(), {"accuracy": (batch.weights * (margin > 0)).sum()})


def batch_of(number):
    """Returns two micro-batches of four pairs; the second one counts one pair."""
    rows = np.random.default_rng(number).integers(0, 16, (2, 4, 9))
    weights = np.ones((2, 4), np.float32)
    weights[1, 1:] = 0
    return Preferences(np.sort(rows), rows, weights)


HELD_OUT = [jax.tree.map(lambda x: x[0], batch_of(100)), jax.tree.map(lambda x: x[1], batch_of(99))]


def dies_at(last, action):
    def read(number):
        if number == last:
            action()
        return batch_of(number)

    return read


def figures_of(out):
    """Returns the lines of metrics.jsonl without times."""
    lines = RunFolder(out).read_metrics()
    return [
        {k: v for k, v in x.items() if k not in ("seconds", "tokens_per_second")} for x in lines
    ]


def train(out, read=batch_of, config=CONFIG, **options):
    options = {"held_out": HELD_OUT, "quiet": True} | options
    return fit(config, Preferred(), read, out, **options)


@pytest.mark.slow
def test_a_run_that_ended_early_continues_as_if_it_had_not(tmp_path, quick_compilation):
    """The script fails at batch 8, after the checkpoint of step 5, and is run again."""
    whole = train(tmp_path / "whole")

    def fail():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        train(tmp_path / "ended", dies_at(8, fail))
    again = train(tmp_path / "ended")
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    lines = figures_of(tmp_path / "ended")
    assert lines == figures_of(tmp_path / "whole")
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, 13)) and lines[-1]["scored"] == 5
    loaded = jf.load(tmp_path / "ended")
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, whole)
    assert loaded.model == jf.build(MODEL) and loaded.tokenizer is None
    assert (tmp_path / "ended" / "loss.png").exists()


def test_processes_read_the_rows_of_one():
    """Together they read the batch of one process, micro-batch by micro-batch."""
    whole, shares = next(NumberedBatches(batch_of)), [Share(0, 2), Share(1, 2)]
    parts = [next(NumberedBatches(batch_of, share)) for share in shares]
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    assert whole.chosen.dtype == np.int32


def test_a_wrong_run_is_refused_before_a_folder_is_made(tmp_path):
    out = tmp_path / "out"
    tokens = np.zeros((1, 4, 8), np.int32)

    def refused(objective=Preferred(), read=batch_of, config=CONFIG):
        said = error_of(lambda: fit(config, objective, read, out, quiet=True))
        assert not out.exists()
        return said

    assert "objective is None; it must be an Objective" in refused(None)
    assert "batch is a Batch; the objective Preferred takes a Preferences" in refused(
        read=lambda number: Batch(tokens, tokens)
    )
    assert "targets has shape (8,); a micro-batch has targets [batch, length]" in refused(
        CrossEntropy(), lambda number: Batch(tokens[0], tokens[0])
    )
    text = TextTraining(MODEL)
    assert "config is a TextTraining; it must be a RunConfig" in refused(config=text)
    lora = replace(CONFIG, lora=LoraConfig(lora_rank=2))
    assert refused(config=lora) == "lora_rank is 2, but params is None; give weights"
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(lambda: train(tmp_path / "file"))
    assert "is not empty and holds no run" in error_of(lambda: train(tmp_path))


def test_a_run_keeps_its_objective_and_settings(tmp_path, quick_compilation):
    """`jaxformer train` and `fit` continue only their own runs."""
    out, short = tmp_path / "out", replace(CONFIG, steps=1)
    train(out, config=short, held_out=())
    assert "seed is 1, but the run in" in error_of(
        lambda: train(out, config=replace(short, seed=1))
    )
    other = error_of(lambda: fit(short, Preferred(0.2), batch_of, out, quiet=True))
    assert "objective is Preferred(beta=0.2), but the run in" in other
    assert "is a run of a script with the objective Preferred(beta=0.1)" in error_of(
        read_run, RunFolder(out)
    )
    assert "no unfinished run" in error_of(newest_unfinished, tmp_path)
    train(out, config=replace(short, steps=2), held_out=())
    assert [line["step"] for line in figures_of(out)] == [1, 2]
    assert not list(out.glob("*.png"))  # nothing was scored


SCRIPT = """
import sys
from tests.training.test_fit import main
main(*sys.argv[1:])
"""


def main(out, mesh, last):
    """Runs `train` on a mesh in a separate process, and kills it at a batch."""
    sizes = dict(zip(("data", "fsdp", "tensor"), map(int, mesh.split(",")), strict=True))
    config = replace(CONFIG, mesh=MeshSizes(**sizes))
    train(out, dies_at(int(last), lambda: os.kill(os.getpid(), signal.SIGKILL)), config)


@pytest.mark.slow
def test_a_killed_run_on_a_mesh_equals_a_run_on_one_device(tmp_path):
    """It begins on one mesh of eight simulated devices and continues on another."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    environment = {**os.environ, **flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for mesh, last, status in (("2,2,2", 8, -signal.SIGKILL), ("1,4,2", 99, 0)):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "mesh"), mesh, str(last)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == status, done.stderr
    train(tmp_path / "one", config=replace(CONFIG, mesh=MeshSizes()))
    found, wanted = (figures_of(tmp_path / name) for name in ("mesh", "one"))
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(line[name], value, rtol=1e-4, err_msg=json.dumps(line))
