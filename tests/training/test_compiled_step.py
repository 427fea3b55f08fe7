"""A training step is compiled once for each batch shape, on first use."""

from contextlib import contextmanager, nullcontext

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.batch import Batch
from jaxformer.training.step import CompiledStep


def batch_of(width: int) -> Batch:
    ids = np.ones((1, 2, width), np.int32)
    return Batch(ids, ids, ids.astype(np.float32))


def recorded():
    """Returns the traced widths, the compiled step, and (width, traces) of each report."""
    traced, said = [], []

    @jax.jit
    def step(state, batch, rate):
        traced.append(batch.inputs.shape[-1])
        return state + rate * batch.inputs.sum(), batch.weights.sum()

    @contextmanager
    def compiling(width):
        before = len(traced)
        yield
        said.append((width, len(traced) - before))

    return traced, CompiledStep(step, compiling), said


@settings(max_examples=20, deadline=None)
@given(widths=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_training_step_is_compiled_once_for_each_batch_width(widths):
    _, compiled, said = recorded()
    state = other = np.float32(0)
    for width in widths:
        state, measured = compiled(state, batch_of(width), np.float32(0.5))
        other = other + 0.5 * 2 * width
        assert state == other and measured == 2 * width
    assert said == [(width, 1) for width in dict.fromkeys(widths)]


def test_training_step_is_compiled_for_requested_batch_widths_only():
    traced, compiled, said = recorded()
    program = compiled.compile(np.float32(0), batch_of(4))
    assert program.memory_analysis() is not None
    assert traced == [4] and said == [(4, 1)]
    compiled(np.float32(0), batch_of(4), np.float32(1))
    assert traced == [4]


def test_failed_compilation_of_training_step_is_not_cached():
    @jax.jit
    def step(state, batch, rate):
        raise ValueError("no")

    compiled = CompiledStep(step, lambda width: nullcontext())
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            compiled.compile(np.float32(0), batch_of(2))
