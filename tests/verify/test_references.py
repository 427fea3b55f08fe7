"""References, which are changed in place, hide paths from taint, so it refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.verify.taint import taint
from tests.properties import tiny

LENGTH = 6

pytestmark = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")


def _read(held, x):
    return x + held[...][::-1]


def _written(held, x):
    held[...] = x
    return held[...][::-1]


def _added_to(held, x):
    jax.ref.addupdate(held, ..., x)
    return held[...]


def _compiled(held, x):
    return jax.jit(lambda x: _written(held, x))(x)


def _step_by_step(held, x):
    def step(state, row):
        held[1] = row
        return state + held[0], state

    return jax.lax.scan(step, jnp.zeros(4), x)[1]


def _in_a_loop(held, x):
    def step(i, x):
        held[0] = x[i]
        return x + held[3]

    return jax.lax.fori_loop(0, 3, step, x)


def _in_a_branch(held, x):
    return jax.lax.cond(x[0, 0] > 99, lambda x: x, lambda x: _written(held, x), x)


def _computed_again(held, x):
    return jax.checkpoint(lambda x: _read(held, x))(x)


USES = (_read, _written, _added_to, _compiled, _step_by_step, _in_a_loop, _in_a_branch)
USES = {use.__name__: use for use in (*USES, _computed_again)}
REFUSED = r"uses a reference .*pass witnesses="


def made_outside(use):
    held = jax.new_ref(jnp.ones((LENGTH, 4)))
    return (lambda x: use(held, x)), held


@pytest.mark.parametrize("name", USES)
def test_taint_analysis_rejects_mutable_array_created_outside_function(name):
    """The reference is unchanged, because the function has not run."""
    function, held = made_outside(USES[name])
    with pytest.raises(ValueError, match=REFUSED):
        taint(function, tiny.embeddings(0, LENGTH, 4), 1)
    np.testing.assert_array_equal(held[...], 1.0)


@pytest.mark.parametrize("name", USES)
def test_taint_analysis_rejects_mutable_array_created_inside_function(name):
    def function(x):
        return USES[name](jax.new_ref(jnp.ones_like(x)), x)

    for run in (function, jax.jit(function)):
        with pytest.raises(ValueError, match=REFUSED):
            taint(run, tiny.embeddings(0, LENGTH, 4), 1)
