"""A training step that is compiled for each batch shape on first use."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import jax
import numpy as np

from jaxformer.training.objectives import AnyBatch
from jaxformer.training.step import Measured, TrainState


class CompiledStep:
    """Training step with one compiled program per batch shape, compiled on first use.

    A translation run has six batch widths. XLA takes about six seconds on two cores for each, so
    training starts after compiling one of them, not all.
    """

    def __init__(
        self, step: jax.stages.Wrapped, compiling: Callable[[int], AbstractContextManager]
    ):
        """Wraps a step without compiling it.

        Args:
            step: The function that `make_step` returns.
            compiling: Returns a context for the width of a batch. The context is open while the
                program of that width is compiled.
        """
        self._step, self._compiling = step, compiling
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def compile(self, state: TrainState, batch: AnyBatch) -> jax.stages.Compiled:
        """Returns the program for batches of this shape; compiles it if necessary."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *(leaf.shape for leaf in leaves)
        if shapes not in self._programs:
            rate = jax.ShapeDtypeStruct((), np.float32)
            with self._compiling(width(batch)):
                self._programs[shapes] = self._step.lower(state, batch, rate).compile()
        return self._programs[shapes]

    def __call__(
        self, state: TrainState, batch: AnyBatch, rate: np.float32
    ) -> tuple[TrainState, Measured]:
        """Makes one update."""
        return self.compile(state, batch)(state, batch, rate)


def width(batch: AnyBatch) -> int:
    """Returns the last size of a batch's first array, such as the number of tokens of a row."""
    return jax.tree.leaves(batch)[0].shape[-1]


def num_bytes(program: jax.stages.Compiled) -> int | None:
    """Returns the bytes that a program needs on each device, or None if that is not known.

    Outputs that reuse the buffers of inputs are not counted twice.
    """
    used = program.memory_analysis()
    if used is None:
        return None
    output = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + used.temp_size_in_bytes + output


def memory_line(program: jax.stages.Compiled) -> str:
    """Returns a line with the memory that a training step needs on each device."""
    size = num_bytes(program)
    if size is None:
        return "memory: unknown on this device"
    return f"memory: {size / 1e6:,.0f} MB for training (state, activations and gradients)"
