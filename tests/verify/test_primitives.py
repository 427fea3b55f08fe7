"""Taint analysis of further JAX primitives and of loops under `vmap`.

As in test_taint, each case is a function of six rows and its dependency matrix.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.verify.witnesses import by_change
from tests.properties import tiny
from tests.verify.test_taint import ALL, FIRST, LENGTH, LOWER, ORDER, SELF, found

pytestmark = pytest.mark.usefixtures("quick_compilation")

HERE = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows"))


def _bits(x, dtype):
    return jax.lax.bitcast_convert_type(x, dtype)


def _ids(x):
    return jnp.int32(100 * jnp.abs(x))


def _key(row):
    return jax.random.key(_ids(row[0]))


STRUCTURAL = {
    "put on a device": (lambda x: jax.device_put(x, jax.devices()[0]), SELF),
    "two put on a device": (lambda x: sum(jax.device_put((x, x[::-1]))), SELF | SELF[::-1]),
    "placed": (lambda x: jax.lax.with_sharding_constraint(x[::-1], HERE), SELF[::-1]),
    "as bits": (lambda x: _bits(_bits(x, jnp.int32) ^ 1, jnp.float32), SELF),
    "as bytes": (lambda x: _bits(x, jnp.uint8), SELF),
    "from bytes": (lambda x: _bits(_ids(x).astype(jnp.uint8), jnp.int32), SELF),
    "said": (lambda x: (jax.debug.print("{}", x.shape), 2 * x)[1], SELF),
    "less in a place": (
        lambda x: jax.lax.scatter_sub(
            x, np.array([0]), x[4], jax.lax.ScatterDimensionNumbers((0,), (0,), (0,))
        ),
        SELF | (FIRST[:, None] & (np.arange(LENGTH) == 4)),
    ),
    "fetched from where inputs say": (lambda x: x[_ids(x[:, 0]) % LENGTH], ALL),
    "fetched within a row": (jax.vmap(lambda row: row[_ids(row[:2]) % 4]), SELF),
    "written where an input says": (
        lambda x: x.at[_ids(x[:1, 0]) % LENGTH].set(x[5]),
        SELF | FIRST | (np.arange(LENGTH) == 5),
    ),
    "added within a row": (jax.vmap(lambda row: row.at[_ids(row[:2]) % 4].add(row[2:])), SELF),
    "about the largest": (lambda x: jax.lax.approx_max_k(x, 2, 0)[0], ALL[:2]),
    "about the largest feature": (lambda x: jax.lax.approx_max_k(x, 2)[0], SELF),
    "gamma functions": (lambda x: jax.scipy.special.gammainc(1 + jnp.abs(x), 2.0), SELF),
    "Bessel functions": (jax.scipy.special.i1e, SELF),
    "drawn by a seed of its own": (jax.vmap(lambda row: jax.random.normal(_key(row), 2)), SELF),
    "drawn by a key of integers": (
        jax.vmap(lambda row: jax.random.normal(jax.random.PRNGKey(_ids(row[0])), 2)),
        SELF,
    ),
    "drawn by a split key": (
        jax.vmap(lambda row: jax.random.uniform(jax.random.split(_key(row))[1])),
        SELF,
    ),
    "drawn by a folded key": (
        jax.vmap(
            lambda row: jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(_key(row), n)))(
                jnp.arange(3)
            )
        ),
        SELF,
    ),
    "drawn from a gamma distribution": (
        jax.vmap(lambda row: jax.random.gamma(_key(row), 1 + jnp.abs(row))),
        SELF,
    ),
    "drawn by one seed": (
        lambda x: x + jax.random.normal(_key(x[0]), (LENGTH, 1)),
        SELF | FIRST,
    ),
}


# ---- loops whose batch elements end at different steps (`vmap` of a while_loop)


def _looped(step, begin=lambda row: jnp.abs(row[0])):
    """Returns a function that takes steps and doubles a number until the number is above 2."""

    def one(row):
        def goes_on(state):
            return state[0] < 2

        def once(state):
            return 2 * state[0] + 0.1, step(state[1], row)

        return jax.lax.while_loop(goes_on, once, (begin(row), row))[1]

    return one


def _counted(row):
    """Adds the row's features one by one while the sum is small."""

    def goes_on(state):
        return (state[0] < 4) & (state[1] < row[0])

    return jax.lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] + row[s[0]]), (0, -3.0))[1]


def _filled(row):
    """Writes one element per step."""

    def once(state):
        count, sums = state
        return count + 1, sums.at[count].set(sums[count - 1] + row[count])

    def goes_on(state):
        return (state[0] < 4) & (state[1][state[0] - 1] < row[0])

    return jax.lax.while_loop(goes_on, once, (0, row))[1]


def _above(x):
    """Moves row i − 1 to row i."""
    return jax.lax.ppermute(x, "rows", [(i, (i + 1) % LENGTH) for i in range(LENGTH)])


def _in_turn(row):
    """Row 0 counts its steps, so its input only affects the number of steps.

    The other rows take a fixed number of steps, and each adds the row above it.
    """
    first = jax.lax.axis_index("rows") == 0

    def once(state):
        number, sums = state
        return 2 * number + 0.1, 1 + sums + jnp.where(first, 0.0, 1.0) * _above(sums)

    begin = jnp.where(first, jnp.abs(row[0]), 0.01), jnp.where(first, jnp.ones(4), row)
    return jax.lax.while_loop(lambda state: state[0] < 2, once, begin)[1]


def _too_late(x):
    """Row 1 takes no step. In a first step it would read the value of row 0 before row 0's step.

    The first step of row 0 replaces this value by 0.
    """

    def one(row, begin, here):
        def once(state):
            number, here, sums = state
            there = jnp.where(jax.lax.axis_index("rows") == 0, 0.0, 1.0) * _above(here)
            return 2 * number + 0.1, jnp.zeros_like(here), sums + there * x[5]

        return jax.lax.while_loop(lambda state: state[0] < 2, once, (begin, here, row))[2]

    first = np.arange(LENGTH) == 0
    begin = jnp.where(first, 0.5, 2 + jnp.abs(x[:, 0]))
    rows = jnp.where(first[:, None], 1.0, x)
    return jax.vmap(one, axis_name="rows")(rows, begin, np.float32(first))


LOOPS = {
    "each to its own end": (jax.vmap(_looped(lambda state, row: state + row)), SELF),
    "none goes on": (
        jax.vmap(_looped(lambda state, row: state + row, lambda row: jnp.abs(row[0]) + 2)),
        SELF,
    ),
    "some decide": (
        lambda x: jax.vmap(_looped(lambda state, row: state + row[1:].sum()))(
            jnp.where((ORDER > 1)[:, None], x, 0.5)
        ),
        SELF & (ORDER > 1)[:, None],
    ),
    "with another": (
        lambda x: jax.vmap(_looped(lambda state, row: state + x[0]))(x),
        SELF | FIRST,
    ),
    "features by number": (jax.vmap(_counted), SELF),
    "places by number": (jax.vmap(_filled), SELF),
    "rows of rows": (
        lambda x: jax.vmap(jax.vmap(_looped(lambda state, row: 2 * state)))(
            x.reshape(3, 2, 4)
        ).reshape(LENGTH, 4),
        SELF,
    ),
    "rows that mix": (
        jax.vmap(
            _looped(lambda state, row: state + jax.lax.all_gather(state, "rows").max(axis=0)),
            axis_name="rows",
        ),
        ALL,
    ),
    "rows that read one that decides": (jax.vmap(_in_turn, axis_name="rows"), LOWER),
    "an end that rows share": (
        jax.vmap(
            _looped(
                lambda state, row: 2 * state,
                lambda row: jax.lax.all_gather(jnp.abs(row[0]), "rows").max(),
            ),
            axis_name="rows",
        ),
        ALL,
    ),
}
FUNCTIONS = STRUCTURAL | LOOPS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_taint_analysis_of_a_jax_primitive_finds_exact_dependencies(name):
    function, expected = FUNCTIONS[name]
    np.testing.assert_array_equal(found(function, tiny.embeddings(0, LENGTH, 4)), expected)


def test_taint_analysis_finds_a_dependency_that_a_zero_blocks_in_only_one_loop_step():
    """A 0 in the evaluated step must not stop the paths of other steps."""
    assert found(_too_late, tiny.embeddings(0, LENGTH, 4))[1, 5]


@pytest.mark.rare
@pytest.mark.parametrize("name", FUNCTIONS)
def test_changing_inputs_of_jax_primitives_changes_only_dependent_outputs(name):
    """It is tested at many points, because inputs change the number of steps."""
    function, expected = FUNCTIONS[name]
    x = tiny.embeddings(0, LENGTH, 4)
    others = (size * tiny.embeddings(seed, LENGTH, 4) for seed in range(1, 4) for size in (0.01, 1))
    seen = [by_change(function, x, 1, np.arange(LENGTH), other) > 0 for other in others]
    assert not (np.any(seen, axis=0) & ~expected).any()
