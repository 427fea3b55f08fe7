"""Taint analysis finds exactly the paths of a function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.verify import rules
from jaxformer.verify.taint import taint
from jaxformer.verify.witnesses import by_change
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 6


def found(function, x, num_positions=1):
    bits, remarks = taint(function, x, num_positions)
    assert not remarks
    bits = bits.reshape(*bits.shape[:num_positions], -1, bits.shape[-1])
    return bits.any(axis=num_positions)


LOWER = np.tril(np.ones((LENGTH, LENGTH), bool))
SELF, ALL = np.eye(LENGTH, dtype=bool), np.ones((LENGTH, LENGTH), bool)
TABLE = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.5
WEIGHTS = np.float32(np.random.default_rng(1).normal(size=(4, 4)))
ORDER = np.array([3, 0, 5, 1, 1, 2])


FIRST = np.arange(LENGTH) == 0


def _while(x, begin=0.0):
    def step(state):
        return state[0] + 1, jnp.roll(state[1], 1, axis=0)

    return jax.lax.while_loop(lambda state: state[0] < 2.5, step, (begin, x))


def _scan(x, reverse=False):
    def step(state, row):
        state = jnp.tanh(state + row)
        return state, state

    return jax.lax.scan(step, jnp.zeros(4), x, reverse=reverse)[1]


def _endless(row):
    """Has a branch that is not taken and whose loop would not end for numbers up to 0."""

    def doubled(row):
        return jax.lax.while_loop(lambda u: u[0] < 10.0, lambda u: u * 2.0, row)

    return jax.lax.cond(row[0] > 9.0, doubled, lambda row: row, row - row[0] - 1)


FUNCTIONS = {
    "itself": (lambda x: jnp.sin(x) * 2 + 1, SELF),
    "a constant": (lambda x: jnp.ones_like(x), ~ALL),
    "times zero": (lambda x: x * 0, ~ALL),
    "times a mask": (lambda x: x * np.float32(ORDER > 1)[:, None], SELF & (ORDER > 1)[:, None]),
    "divided": (lambda x: jnp.where(ORDER > 1, 1.0, 0.0)[:, None] / x, SELF & (ORDER > 1)[:, None]),
    "added to minus infinity": (
        lambda x: jnp.exp(x + jnp.where(ORDER > 1, 0.0, -jnp.inf)[:, None]),
        SELF & (ORDER > 1)[:, None],
    ),
    "the sum": (lambda x: x + x.sum(axis=0), ALL),
    "the sum so far": (lambda x: jnp.cumsum(x, axis=0), LOWER),
    "the sum to come": (lambda x: jax.lax.cumsum(x, axis=0, reverse=True), LOWER.T),
    "the largest so far": (lambda x: jax.lax.cummax(x, axis=0), LOWER),
    "sorted": (lambda x: jnp.sort(x, axis=0), ALL),
    "sorted by feature": (lambda x: jnp.sort(x, axis=1), SELF),
    "in order of the largest": (lambda x: jnp.argmax(x, axis=1), SELF),
    "a product": (lambda x: x @ WEIGHTS, SELF),
    "a product with a table": (lambda x: TABLE.astype(np.float32) @ x, TABLE),
    "a product of a table by feature": (
        lambda x: jnp.einsum("ij,jd->di", TABLE.astype(np.float32), x).T,
        TABLE,
    ),
    "with all": (lambda x: x @ x.T, ALL),
    "in halves": (lambda x: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1), SELF),
    "reversed": (lambda x: x[::-1], SELF[::-1]),
    "shifted": (lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], np.eye(LENGTH, k=-1, dtype=bool)),
    "shifted by one": (lambda x: jnp.roll(x, 1, axis=0), np.roll(SELF, 1, axis=0)),
    "every other": (lambda x: x[::2], SELF[::2]),
    "in another order": (lambda x: x[ORDER], SELF[ORDER]),
    "from a place": (lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.int32(2), 3), SELF[2:5]),
    "put in a place": (
        lambda x: jnp.zeros((LENGTH, 4)).at[jnp.array([4, 1])].set(x[:2]),
        np.array([[j == {4: 0, 1: 1}.get(i) for j in range(LENGTH)] for i in range(LENGTH)]),
    ),
    "written over": (lambda x: x.at[2].set(0.0), SELF & (np.arange(LENGTH) != 2)[:, None]),
    "added in a place": (
        lambda x: x.at[jnp.array([0, 0])].add(x[4:]),
        SELF | np.array([[i == 0 and j >= 4 for j in range(LENGTH)] for i in range(LENGTH)]),
    ),
    "again and again": (lambda x: jnp.tile(x, (2, 1)), np.tile(SELF, (2, 1))),
    "taken apart and put together": (lambda x: jnp.stack(jnp.unstack(x)[::-1]), SELF[::-1]),
    "by bits": (lambda x: (x * 100).astype(jnp.int32) << 1 >> 2, SELF),
    "reshaped": (
        lambda x: x.reshape(3, 2, 4).swapaxes(0, 1).reshape(LENGTH, 4),
        SELF[[0, 2, 4, 1, 3, 5]],
    ),
    "by columns": (lambda x: jnp.ravel(x, order="F").reshape(4, LENGTH).T, SELF),
    "by columns, three at a time": (
        lambda x: jnp.reshape(x, (3, 8), order="F"),
        SELF[:3] | SELF[3:],
    ),
    "with a new axis": (lambda x: jnp.broadcast_to(x[:, None, :, None], (LENGTH, 2, 4, 3)), SELF),
    "chosen": (
        lambda x: jnp.where((ORDER > 1)[:, None], x, x[::-1]),
        np.where((ORDER > 1)[:, None], SELF, SELF[::-1]),
    ),
    "chosen by what it is": (
        lambda x: jnp.where(x[:1] > 9, 1.0, x),
        SELF | FIRST,
    ),
    "chosen by another": (
        lambda x: x + jnp.where(x[:1, :1] > 9, x[-1:], 0.0),
        SELF | FIRST | FIRST[::-1],
    ),
    "with the largest": (lambda x: x + x.max(axis=0), ALL),
    "the two largest": (lambda x: jax.lax.top_k(x, 2, axis=0)[0], ALL[:2]),
    "changed in a place": (lambda x: x.at[2].apply(jnp.sin), SELF),
    "multiplied in a place": (lambda x: x.at[2].multiply(x[4]), SELF | (SELF[2:3].T & SELF[4:5])),
    "a convolution": (
        lambda x: jax.lax.conv_general_dilated(x.T[None], jnp.ones((4, 4, 3)), (1,), [(2, 0)])[0].T,
        rules.convolved(LENGTH, 3),
    ),
    "a centred convolution": (
        lambda x: jax.vmap(lambda c: jnp.convolve(c, jnp.ones(3), mode="same"), 1, 1)(x),
        rules.near(LENGTH, 1),
    ),
    "the mean of a window": (
        lambda x: nn.avg_pool(x[None], (3,), (1,), [(2, 0)])[0],
        rules.convolved(LENGTH, 3),
    ),
    "the largest of two windows": (
        lambda x: nn.max_pool(x[None], (3,), (3,))[0],
        np.repeat(SELF[:2, :2], 3, axis=1),
    ),
    "the smallest of a wide window": (
        lambda x: jax.lax.reduce_window(
            x, np.inf, jax.lax.min, (2, 1), (1, 1), ((2, 0), (0, 0)), window_dilation=(2, 1)
        ),
        rules.convolved(LENGTH, 2, dilation=2),
    ),
    "a window with gaps": (
        lambda x: jax.lax.reduce_window(
            x, 0.0, jax.lax.add, (2, 2), (1, 1), ((0, 1), (0, 0)), base_dilation=(2, 1)
        ),
        np.repeat(SELF, 2, axis=0)[1:],
    ),
    "waves along it": (lambda x: jnp.fft.fft(x, axis=0).real, ALL),
    "waves across it": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), SELF),
    "the largest in a place": (
        lambda x: x.at[jnp.array([0, 0])].max(x[4:]),
        SELF | np.array([[i == 0 and j >= 4 for j in range(LENGTH)] for i in range(LENGTH)]),
    ),
    "a state": (_scan, LOWER),
    "a state from behind": (lambda x: _scan(x, reverse=True), LOWER.T),
    "a loop": (lambda x: _while(x)[1], np.roll(SELF, 3, axis=0)),
    "a loop that looks": (lambda x: _while(x, x[0, 0] * 0.01)[1], ALL),
    "a loop for each": (
        lambda x: jax.vmap(
            lambda n, row: jax.lax.while_loop(
                lambda state: state[0] < 2.5, lambda state: (state[0] + 1, 2 * state[1]), (n, row)
            )[1]
        )(jnp.arange(6.0), x),
        SELF,
    ),
    "a branch": (lambda x: jax.lax.cond(True, lambda x: x, lambda x: x[::-1], x), SELF),
    "a branch that looks": (
        lambda x: jax.lax.cond(x[0, 0] > 99, lambda x: x[::-1], lambda x: x, x),
        SELF | FIRST | SELF[::-1],
    ),
    "an index that looks": (
        lambda x: jax.lax.dynamic_index_in_dim(x, (x[0, 0] > 99).astype(int), 0),
        ALL[:1],
    ),
    "a number that decides": (lambda x: jax.lax.select(x[0, 0] > 0.2, x, 2 * x), SELF | FIRST),
    "a number that bounds": (
        lambda x: jax.lax.clamp(x[0, 0] * 0.1, x, x[0, 0] * 0.1 + 0.5),
        SELF | FIRST,
    ),
    "a number times a table": (
        lambda x: (x[0].sum() * jnp.ones((LENGTH, 3))).mean(1),
        FIRST | ~ALL,
    ),
    "a number for every element": (
        lambda x: jax.nn.softmax(x[0].sum() * jnp.arange(1.0, 19.0).reshape(LENGTH, 3), axis=0),
        FIRST | ~ALL,
    ),
    "a number subtracted from and divided by": (
        lambda x: x[0, 0] - jnp.ones((LENGTH, 3)) / x[1, 0],
        (np.arange(LENGTH) < 2) | ~ALL,
    ),
    "numbers that a state stacks": (
        lambda x: jax.lax.scan(lambda c, r: (c + r[0], c * jnp.ones(4)), 0.0, x)[1],
        LOWER & ~SELF,
    ),
    "a branch that would never end": (
        lambda x: jax.vmap(lambda i: x[i])(ORDER) + _endless(x[0]),
        SELF[ORDER] | FIRST,
    ),
    "compiled": (jax.jit(lambda x: jnp.cumsum(x, axis=0)), LOWER),
    "computed again": (jax.checkpoint(lambda x: jnp.cumsum(x, axis=0)), LOWER),
    "with a derivative of its own": (jax.nn.relu, SELF),
    "attention": (
        lambda x: jax.nn.softmax(jnp.where(LOWER, x @ x.T, -jnp.inf), axis=-1) @ x,
        LOWER,
    ),
    "attention by a large number": (
        lambda x: jax.nn.softmax(jnp.where(LOWER, x @ x.T, -1e9), axis=-1) @ x,
        LOWER,
    ),
    "attention by adding infinity": (
        lambda x: jax.nn.softmax(x @ x.T + jnp.where(LOWER, 0, -jnp.inf), axis=-1) @ x,
        LOWER,
    ),
    "attention by adding a large number": (
        lambda x: jax.nn.softmax(x @ x.T + jnp.where(LOWER, 0, -1e9), axis=-1) @ x,
        LOWER,
    ),
    "attention to too much": (
        lambda x: jax.nn.softmax(jnp.where(LOWER, x @ x.T, -9.0), axis=-1) @ x,
        ALL,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_taint_analysis_finds_exactly_the_dependencies_of_a_function(name):
    function, expected = FUNCTIONS[name]
    np.testing.assert_array_equal(found(function, tiny.embeddings(0, LENGTH, 4)), expected)


@pytest.mark.rare
@pytest.mark.parametrize("name", FUNCTIONS)
def test_perturbed_inputs_change_only_the_outputs_that_depend_on_them(name):
    """Checks the expected tables by changing inputs, independently of taint.

    A changed input affects only outputs of its paths. Over a few tries it affects all of them,
    except in `CHOICES`.
    """
    function, expected = FUNCTIONS[name]
    x, *others = (tiny.embeddings(seed, LENGTH, 4) for seed in range(4))
    seen = [by_change(function, x, 1, np.arange(LENGTH), other) > 0 for other in others]
    changed = np.any(seen, axis=0)
    assert not (changed & ~expected).any()
    assert (changed == expected).all() or name in CHOICES


# Functions that choose between cases by value; the few tested inputs always choose the same case.
CHOICES = (
    "the largest so far",
    "sorted",
    "in order of the largest",
    "chosen by what it is",
    "a loop that looks",
    "a branch that looks",
    "an index that looks",
    "a number that bounds",
    "chosen by another",
    "with the largest",
    "the two largest",
    "the largest of two windows",
    "the smallest of a wide window",
    "the largest in a place",
)


@pytest.mark.slow
@given(seed=tiny.seeds, rows=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=9))
def test_embedding_lookup_depends_only_on_its_index_and_table_row(seed, rows):
    """A looked-up row depends on its id and its row of the table, not on other rows."""
    table = tiny.embeddings(seed, LENGTH, 4)
    np.testing.assert_array_equal(
        found(lambda ids: table[ids], jnp.array(rows)), np.eye(len(rows), dtype=bool)
    )
    bits, _ = taint(lambda table: table[jnp.array(rows)], table, 1)
    np.testing.assert_array_equal(bits.any(axis=1), np.eye(LENGTH, dtype=bool)[rows])
    one = found(lambda ids: table[ids[-1]][None], jnp.array(rows))  # a scalar index
    np.testing.assert_array_equal(one, np.eye(len(rows), dtype=bool)[-1:])


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(LENGTH)), "cholesky"),
        (
            lambda x: jax.lax.reduce_window(
                x, 0.0, lambda a, b: a + b + a * b, (2, 1), (1, 1), "SAME"
            ),
            "reduce_window",
        ),
        (lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + b + a * b, (1,)), "reduce"),
    ],
)
def test_output_of_an_unknown_primitive_depends_on_all_operands(function, name):
    """A primitive with a jaxpr among its parameters is not treated as a call of it."""
    bits, remarks = taint(function, tiny.embeddings(0, LENGTH, LENGTH), 1)
    assert bits[-1].all() and f"no rule for {name}" in remarks[0]
