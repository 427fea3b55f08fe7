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
        found = [num_bytes(program) for program in self.programs.values()]
        return None if None in found else max(found)


def num_bytes(program: jax.stages.Compiled) -> int | None:
    """What a program needs on a device; outputs that take the place of inputs do not count again.
    None: the device does not say."""
    used = program.memory_analysis()
    if used is None:
        return None
    made = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + used.temp_size_in_bytes + made
