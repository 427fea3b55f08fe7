"""Runs with a user's objective: resuming, meshes, and errors before any computation."""

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
from jaxformer.cli.checkpoints import open_base
from jaxformer.functional import Attention, Causal, FeedForward, LayerNorm, Residual
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.batch import Batch, Share
from jaxformer.training.config import MeshSizes, OptimizerConfig, RunConfig, TextTraining
from jaxformer.training.fit import fit
from jaxformer.training.objectives import CrossEntropy, Objective, Sums
from jaxformer.training.run_folders import newest_unfinished, read_run
from jaxformer.training.tasks.own_batches import NumberedBatches
from tests.errors import error_of
from tests.models.own_layer import Strided, snake

MODEL = jf.DecoderConfig(
    vocab_size=16, max_length=8, num_layers=1, embed_dim=16, num_heads=2, dropout=0.1
)
CONFIG = RunConfig(
    MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    steps=12,
    checkpoint_every=5,
    max_to_keep=9,
)
CONFIG = replace(CONFIG, evaluate_every=6)


class Preferences(NamedTuple):
    """Pairs of sequences, the first of which is preferred."""

    chosen: jax.Array
    rejected: jax.Array
    weights: jax.Array


@dataclass(frozen=True)
class Preferred(Objective[Preferences]):
    """The log probability that the model gives to the preferred sequence of each pair."""

    batch_type = Preferences
    beta: float = 0.1

    def count(self, batch):
        return batch.weights.sum()

    def loss(self, model, params, batch, key):
        def log_probs(sequences):
            logits = model.apply({"params": params}, sequences[:, :-1], rngs=rngs)
            return -token_losses(logits, sequences[:, 1:]).sum(axis=-1)

        rngs = {} if key is None else {"dropout": key}
        margin = self.beta * (log_probs(batch.chosen) - log_probs(batch.rejected))
        losses = -jax.nn.log_sigmoid(margin) * batch.weights
        return Sums(losses.sum(), {"accuracy": (batch.weights * (margin > 0)).sum()})


def batch_of(number):
    """Returns two micro-batches of four pairs. In the second micro-batch, one pair counts."""
    sequences = np.random.default_rng(number).integers(0, 16, (2, 4, 9))
    weights = np.ones((2, 4), np.float32)
    weights[1, 1:] = 0
    return Preferences(np.sort(sequences), sequences, weights)


# Layers with a mask and an activation that a user defines.
LAYERS = (
    (
        Residual(Attention(2, 2, 8, mask=Causal() & Strided(2)), LayerNorm()),
        Residual(FeedForward(24, snake), LayerNorm(), dropout=0.1),
    ),
)
HELD_OUT = [jax.tree.map(lambda x: x[0], batch_of(100)), jax.tree.map(lambda x: x[1], batch_of(99))]


def tokens_of(number):
    """Returns a batch for predicting next tokens."""
    sequences = batch_of(number).chosen
    return Batch(sequences[..., :-1], sequences[..., 1:])


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
def test_rerunning_an_interrupted_training_script_equals_uninterrupted_training(
    tmp_path, quick_compilation
):
    """The script fails at batch 8, after the checkpoint of step 5, and is then run again."""
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


@pytest.mark.slow
def test_run_cannot_be_resumed_with_different_layers(tmp_path, quick_compilation):
    """config.json names the layers' classes and functions. A resumed run must have the same
    layers."""
    out, config = tmp_path / "out", replace(CONFIG, steps=1)
    trained = train(out, config=config, layers=LAYERS, held_out=())
    assert "jf.load(folder, layers=[Strided])" in error_of(jf.load, out)
    loaded = jf.load(out, layers=[Strided, snake])
    assert loaded.model.layers == LAYERS
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, trained)
    other = (replace(LAYERS[0][0], dropout=0.5), *LAYERS[0][1:])
    said = error_of(lambda: train(out, config=config, layers=(other,)))
    assert f"layers[0][0].dropout is 0.5, but the run in {out} was started with 0.0" in said
    assert "layers is None, but the run in" in error_of(lambda: train(out, config=config))
    said = error_of(open_base, str(out), None, None, False)
    assert said.startswith(f"{out} contains a model with its own layers, which flags cannot")


def test_micro_batches_of_all_processes_equal_those_of_one_process():
    """The processes together read each micro-batch that a single process would read."""
    whole, shares = next(NumberedBatches(batch_of)), [Share(0, 2), Share(1, 2)]
    parts = [next(NumberedBatches(batch_of, share)) for share in shares]
    joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    assert whole.chosen.dtype == np.int32


def test_fit_rejects_wrong_arguments_before_it_creates_a_folder(tmp_path):
    out = tmp_path / "out"
    tokens = np.zeros((1, 4, 8), np.int32)

    def refused(objective=Preferred(), read=batch_of, config=CONFIG):
        said = error_of(lambda: fit(config, objective, read, out, quiet=True))
        assert not out.exists()
        return said

    assert "objective is None; it must be an Objective" in refused(None)
    assert "batch is a Batch, but the objective Preferred needs a Preferences" in refused(
        read=lambda number: Batch(tokens, tokens)
    )
    assert "targets has shape (8,); it must be [batch, length] in a micro-batch" in refused(
        CrossEntropy(), lambda number: Batch(tokens[0], tokens[0])
    )
    text = TextTraining(MODEL)
    assert "config is a TextTraining; it must be a RunConfig" in refused(config=text)

    @dataclass(frozen=True)
    class Local(Preferred):
        pass

    assert "objective is test_fit_rejects_wrong_arguments_before_it_creates_a_folder" in refused(
        Local()
    )
    lora = replace(CONFIG, lora=LoraConfig(lora_rank=2))
    assert (
        refused(config=lora)
        == "lora_rank is 2, but params is None; pass the base weights as params"
    )
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(lambda: train(tmp_path / "file"))
    assert "contains files, but not a run" in error_of(lambda: train(tmp_path))


@pytest.mark.slow
def test_run_can_be_resumed_only_with_the_same_settings(tmp_path, quick_compilation):
    """`jaxformer train` continues only its own runs, and so does `fit`."""
    out, short = tmp_path / "out", replace(CONFIG, steps=1)
    train(out, config=short, held_out=())
    assert "seed is 1, but the run in" in error_of(
        lambda: train(out, config=replace(short, seed=1))
    )
    other = error_of(lambda: fit(short, Preferred(0.2), batch_of, out, quiet=True))
    assert f"objective.beta is 0.2, but the run in {out} was started with 0.1" in other
    named = f"{__name__}:Preferred(beta=0.1)"
    other = error_of(lambda: fit(short, CrossEntropy(), tokens_of, out, quiet=True))
    assert f"objective is {CrossEntropy.__module__}:CrossEntropy(" in other
    assert f"was started with {named}; restore the old" in other
    other = error_of(lambda: train(out, config=short, mask=Causal() & Strided(2)))
    assert f"mask is All(parts=(Causal(), {Strided.__module__}:Strided(stride=2)))" in other
    assert f"was trained by a Python script with the objective {named}; to continue" in error_of(
        read_run, RunFolder(out)
    )
    assert "no unfinished run" in error_of(newest_unfinished, tmp_path)
    train(out, config=replace(short, steps=2), held_out=())
    assert [line["step"] for line in figures_of(out)] == [1, 2]
    assert not list(out.glob("*.png"))  # no evaluation took place


SCRIPT = """
import sys
from tests.training.test_fit import main
main(*sys.argv[1:])
"""


def main(out, mesh, last):
    """Runs `train` with own layers on a mesh in a separate process, and kills it at a batch."""
    sizes = dict(zip(("data", "fsdp", "tensor"), map(int, mesh.split(",")), strict=True))
    config = replace(CONFIG, mesh=MeshSizes(**sizes))
    dies = dies_at(int(last), lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(out, dies, config, layers=LAYERS)


@pytest.mark.slow
def test_a_killed_run_on_a_mesh_equals_a_run_on_one_device(tmp_path):
    """The run begins on a mesh of eight simulated devices and continues on another mesh."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
    environment = {**os.environ, **flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for mesh, last, status in (("2,2,2", 8, -signal.SIGKILL), ("1,4,2", 99, 0)):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "mesh"), mesh, str(last)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == status, done.stderr
    train(tmp_path / "one", config=replace(CONFIG, mesh=MeshSizes()), layers=LAYERS)
    found, wanted = (figures_of(tmp_path / name) for name in ("mesh", "one"))
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(line[name], value, rtol=1e-4, err_msg=json.dumps(line))
