"""Training steps of decoders, with the largest batch that fits into memory."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.bench.measurement import TRAINING, DType, Measurement
from jaxformer.bench.timing import Rounds
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.flops import training_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import make_mesh
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.placed import init_on, place_batch
from jaxformer.training.step import Measured, make_step

T = TypeVar("T")


class TrainingCase(NamedTuple):
    """Model and batch of a training step.

    Attributes:
        name: The name of the model.
        config: Its config.
        length: Tokens per row.
        batch_size: Rows per device. It is halved until the step fits into memory.
    """

    name: str
    config: TransformerConfig
    length: int
    batch_size: int


def largest_that_fits(make: Callable[[int], T], batch_size: int) -> tuple[int, T]:
    """Calls make(batch_size), with half the batch size after each time that memory runs out.

    Returns:
        (the batch size that fits, the result of `make`).
    """
    while True:
        try:
            return batch_size, make(batch_size)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or batch_size == 1:
                raise
        batch_size //= 2


def measure_step(case: TrainingCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures the step of `jaxformer train`: forward, backward, clipping by norm and AdamW.

    On several devices it runs on the mesh fsdp=N of all devices. A step moves the parameters and
    the optimizer state at least twice: it reads and writes them. Activations are not counted.

    Args:
        case: The model and the batch.
        dtype: The dtype of the activations.
        rounds: How often the step is timed.
    """
    model, count = build(replace(case.config, dtype=dtype)), jax.device_count()
    mesh = make_mesh({"fsdp": count}) if count > 1 else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        rows, run = largest_that_fits(
            lambda rows: RandomStep(model, rows * count, case.length, mesh), case.batch_size
        )
        timing = rounds.measure(run)
    rows *= count
    name = f"{case.name}, {rows} × {case.length:,} tokens"
    flops = rows * training_flops(model, case.length, only_visible=True)
    moved, tokens = 2 * run.num_bytes / count, rows * case.length
    return [Measurement(TRAINING, name, dtype, timing, flops, moved, tokens, devices=count)]


class RandomStep:
    """The step of `jaxformer train` for random tokens, which keeps its state between calls."""

    def __init__(self, model: LanguageModel, rows: int, length: int, mesh: Mesh | None = None):
        """Makes a first update, which compiles the program and shows that it fits into memory.

        Args:
            model: A decoder.
            rows: Rows of the batch.
            length: Tokens per row.
            mesh: The mesh that shards state and batch; None: one device.
        """
        optimizer, vocab_size = make_optimizer(OptimizerConfig()), model.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocab_size, (1, rows, length + 1), np.int32)
        batch = Batch(tokens[..., :-1], tokens[..., 1:])
        self.batch = jax.device_put(batch) if mesh is None else place_batch(batch, mesh)
        self.state = init_on(mesh, model, optimizer, 0)
        self.step = make_step(model, optimizer)
        jax.block_until_ready(self())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters and of the optimizer state."""
        parts = (self.state.params, self.state.optimizer)
        return sum(x.nbytes for x in jax.tree.leaves(parts))

    def __call__(self) -> Measured:
        """Makes an update. Returns its measurements."""
        self.state, measured = self.step(self.state, self.batch)
        return measured
