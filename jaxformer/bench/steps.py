"""Training steps of decoders, with the largest batch that fits into memory."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxformer.bench.measurement import TRAINING, DType, Measurement
from jaxformer.bench.timing import Rounds
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.flops import training_flops
from jaxformer.models.kinds import build
from jaxformer.models.mesh import make_mesh
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.placed import init_on, place_batch
from jaxformer.training.step import make_step

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


def measure_step(case: TrainingCase, dtype: DType, rounds: Rounds) -> Measurement:
    """Measures the step of `jaxformer train`: forward, backward, clipping by norm and AdamW.

    On several devices it runs on the mesh fsdp=N of all devices. A step moves the parameters and
    the optimizer state at least twice: it reads and writes them. Activations are not counted.

    Args:
        case: The model and the batch.
        dtype: The dtype of the activations.
        rounds: How often the step is timed.
    """
    config, count = replace(case.config, dtype=dtype), jax.device_count()
    mesh = make_mesh({"fsdp": count}) if count > 1 else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        rows, run = largest_that_fits(
            lambda rows: _ready(config, case.length, rows * count, mesh), case.batch_size
        )
        timing = rounds.measure(run)
    rows *= count
    return Measurement(
        TRAINING,
        f"{case.name}, {rows} × {case.length:,} tokens",
        dtype,
        timing,
        flops=rows * training_flops(config, case.length, only_visible=True),
        bytes=2 * run.num_bytes / count,
        tokens=rows * case.length,
        devices=count,
    )


class _Step:
    """A training step that is called without arguments and keeps its state."""

    def __init__(self, step: Callable, state: Any, batch: Batch):
        self._step, self._state, self._batch = step, state, batch
        parts = (state.params, state.optimizer)
        self.num_bytes = sum(x.nbytes for x in jax.tree.leaves(parts))

    def __call__(self) -> Any:
        """Makes an update. Returns its measurements."""
        self._state, measured = self._step(self._state, self._batch)
        return measured


def _ready(config: TransformerConfig, length: int, rows: int, mesh: Any) -> _Step:
    """Returns the step for random tokens, after a first update, which shows that it fits."""
    model, optimizer = build(config), make_optimizer(OptimizerConfig())
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, rows, length + 1))
    tokens = tokens.astype(np.int32)
    batch = Batch(tokens[..., :-1], tokens[..., 1:])
    batch = jax.device_put(batch) if mesh is None else place_batch(batch, mesh)
    step = _Step(make_step(model, optimizer), init_on(mesh, model, optimizer, 0), batch)
    jax.block_until_ready(step())
    return step
