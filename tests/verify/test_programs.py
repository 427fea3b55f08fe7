"""Taint of random programs against brute force: it finds all dependencies and few others."""

import jax
import numpy as np
import pytest

from jaxformer.verify.taint import taint
from tests.verify.programs import CHOOSING, LENGTH, SMOOTH, program

pytestmark = pytest.mark.slow


def changed(function, rng, tries: int):
    """Returns bool [outputs, inputs], true if an output changes with an input at some point."""
    run, seen = jax.jit(function), np.zeros((LENGTH, LENGTH), bool)
    for number in range(tries):
        x, others = np.float32((0.3 + number) * rng.normal(size=(2, LENGTH, 3)))
        before = np.asarray(run(x))
        for column in range(LENGTH):
            z = x.copy()
            z[column] = others[column]
            seen[:, column] |= (np.asarray(run(z)) != before).any(axis=1)
    return seen


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(SMOOTH, id="smooth", marks=pytest.mark.rare),
        pytest.param(CHOOSING, id="choosing"),
    ],
)
def test_taint_analysis_of_random_programs_finds_all_dependencies(kinds):
    """Brute force with few tries misses paths of steps that depend on values."""
    edges = spurious = 0
    for seed in range(15):
        function, rng = program(seed, kinds), np.random.default_rng(seed)
        x = np.float32(rng.normal(size=(LENGTH, 3)))
        bits, remarks = taint(function, x, 1)
        found, true = bits.any(axis=1), changed(function, rng, 3)
        assert not remarks and not (true & ~found).any(), (seed, jax.make_jaxpr(function)(x))
        edges, spurious = edges + int(true.sum()), spurious + int((found & ~true).sum())
    assert edges > 100 and spurious <= (0.1 if kinds is SMOOTH else 0.5) * edges
