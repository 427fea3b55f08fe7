"""A training step, compiled before anything is trained."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from jaxformer.training.batch import Batch
from jaxformer.training.step import Measured, TrainState


class CompiledStep(NamedTuple):
    """One program for each shape of batch."""

    programs: dict[tuple[int, ...], jax.stages.Compiled]

    @classmethod
    def of(cls, step, state: TrainState, batches: Iterable[Batch]) -> "CompiledStep":
        """step: as of `make_step`; batches: shapes."""
        rate = jax.ShapeDtypeStruct((), np.float32)
        return cls({x.inputs.shape: step.lower(state, x, rate).compile() for x in batches})

    def __call__(self, state: TrainState, batch: Batch, rate) -> tuple[TrainState, Measured]:
        return self.programs[batch.inputs.shape](state, batch, rate)

    @property
    def num_bytes(self) -> int | None:
        """What it needs on a device, state, activations and gradients; None: the device does not
        say."""
        found = [program.memory_analysis() for program in self.programs.values()]
        if None in found:
            return None
        return max(x.argument_size_in_bytes + x.temp_size_in_bytes for x in found)
