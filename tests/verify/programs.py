"""Random programs of about 50 primitives, as inputs of taint analysis.

A program keeps a list of arrays whose first axis is the position axis. Each step computes an array
from earlier ones and appends it. Steps whose control flow depends on values (`CHOOSING`) have paths
that only a few inputs exercise.
"""

import jax
import jax.numpy as jnp
import numpy as np

LENGTH = 5


def _static(rng, *shape):
    """Returns a constant array of 0, ±1 and 0.5 with many zeros."""
    return np.float32(rng.choice([0.0, 0.0, 1.0, -1.0, 0.5], shape))


def _order(rng):
    return rng.integers(0, LENGTH, LENGTH)


def _elementwise(rng, x, y):
    one = [jnp.sin, jnp.tanh, jnp.exp, jnp.abs, jnp.square, jax.nn.sigmoid, jnp.negative, jnp.cbrt]
    two = [jnp.add, jnp.subtract, jnp.multiply, jnp.arctan2, lambda a, b: a / (2 + b * b)]
    return two[rng.integers(len(two))](one[rng.integers(len(one))](x), y)


def _constant(rng, x, y):
    table = _static(rng, *x.shape)
    return [x * table, jnp.where(table > 0, x, y), x + table, table * table / (1 + x * x)][
        rng.integers(4)
    ]


def _number(rng, x, y):
    """Combines a marked scalar with arrays with and without marks."""
    number = x[rng.integers(LENGTH), 0]
    table = _static(rng, *y.shape)
    return [
        number * table,
        y * number,
        number - y,
        jnp.where(number > -99, number, y),
        jax.lax.clamp(-9 + number * 0, y, number + 9),
        jax.lax.select(np.bool_(rng.integers(2)), y * number, table + number),
    ][rng.integers(6)]


def _moved(rng, x, y):
    shift, order = int(rng.integers(1, LENGTH)), _order(rng)
    wide = jnp.concatenate([x, y])
    start = rng.integers(LENGTH)
    return [
        x[::-1],
        jnp.roll(x, shift, axis=0),
        x[order],
        x.at[order[:2]].set(y[:2]),
        x.at[order].add(y),
        x.at[order[:3]].multiply(y[1:4]),
        x.at[order[:2]].max(y[:2]),
        wide[start : start + LENGTH],
        jax.lax.dynamic_slice_in_dim(wide, start, LENGTH),
        jax.lax.dynamic_update_slice_in_dim(x, y[:2], start, 0),
        jax.lax.pad(x, 0.0, [(-1, 1, 0), (0, 0, 0)]),
        jax.lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)])[:LENGTH],
        jnp.take(x, order + 2, axis=0, mode="fill", fill_value=0.0),
        jnp.take(x, order + 2, axis=0, mode="clip"),
        jnp.take_along_axis(x, rng.integers(0, LENGTH, x.shape), axis=0),
        wide[::2][:LENGTH],
        jnp.repeat(x, 2, axis=0)[:LENGTH],
        jnp.tile(x, (2, 1))[shift : shift + LENGTH],
    ][rng.integers(18)]


def _reshaped(rng, x, y):
    """Reorders the elements by reshapes that end in the shape of x."""
    order = "F" if rng.integers(2) else "C"
    flat = jnp.ravel(x if rng.integers(2) else x.T, order=order)
    return [
        flat.reshape(x.shape, order=order),
        flat.reshape(x.shape),
        flat.reshape(x.shape[::-1]).T,
        jnp.reshape(jnp.stack([x, y]), (2 * x.shape[1], LENGTH), order="F")[: x.shape[1]].T,
        jnp.moveaxis(jnp.stack([x, y], 1), 2, 0).reshape(-1, *x.shape)[0],
        jnp.split(jnp.concatenate([x, y], 1), 2, axis=1)[1],
    ][rng.integers(6)]


def _reduced(rng, x, y):
    return [
        x + y.sum(axis=1, keepdims=True),
        x + y[1:3].sum(axis=0),
        jnp.cumsum(x, axis=int(rng.integers(2))),
        jax.lax.cumsum(x, axis=0, reverse=True),
        jax.lax.cumlogsumexp(x, axis=0),
        x + jnp.prod(jnp.cos(y[:2]), axis=0),
        jax.lax.cumprod(jnp.cos(x), axis=0),
        x + y.mean(),
    ][rng.integers(8)]


def _product(rng, x, y):
    table, width = _static(rng, LENGTH, LENGTH), x.shape[1]
    return [
        table @ x,
        x @ _static(rng, width, width),
        (x @ y.T * table) @ y,
        jnp.einsum("id,jd,ij->jd", x, y, table),
        jax.lax.dot_general(x, y, (((), ()), ((0, 1), (0, 1)))),
        jnp.einsum("ld,le->lde", x, y).sum(axis=2),
        jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), x @ y.T, -jnp.inf), axis=-1) @ y,
        jax.nn.softmax(x @ y.T + jnp.where(np.tri(LENGTH, k=1), 0, -1e9), axis=-1) @ x,
        jnp.stack([jnp.convolve(x[:, i], _static(rng, 3))[:LENGTH] for i in range(width)], 1),
        jax.lax.conv_general_dilated(
            x.T[None],
            _static(rng, width, 1, 2),
            (1,),
            [(2, 0)],
            rhs_dilation=(2,),
            feature_group_count=width,
        )[0].T,
    ][rng.integers(10)]


def _looped(rng, x, y):
    table = _static(rng, *x.shape)

    def step(state, row):
        state = jnp.tanh(state * row[0] + row[1])
        return state, state

    scanned = jax.lax.scan(step, x[0], (jnp.stack([table, y], 1)), reverse=bool(rng.integers(2)))
    return [
        scanned[1],
        jax.jit(lambda x: x[::-1] * table)(x),
        jax.checkpoint(lambda x: jnp.sin(x) + y)(x),
        jax.vmap(lambda a, b: a * b.sum())(x, y),
        jax.lax.fori_loop(0, 2, lambda i, x: jnp.roll(x, 1, 0) + y[i], x),
        jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + y[::-1]), (0, x))[1],
        jax.lax.cond(bool(rng.integers(2)), lambda x: x[::-1], lambda x: x + y, x),
        jax.nn.relu(x) + jax.nn.gelu(y),
    ][rng.integers(8)]


def _choosing(rng, x, y):
    axis = int(rng.integers(2))
    index = jnp.int32(jnp.abs(10 * y[:, 0])) % LENGTH
    return [
        jnp.sort(x, axis=axis),
        x + jnp.max(y, axis=axis, keepdims=True),
        x + jnp.argmax(y, axis=axis, keepdims=True),
        jax.lax.cummax(x, axis=axis),
        jnp.maximum(x, y),
        jnp.minimum(x, y.mean()),
        jnp.where(x > y, x, y[::-1]),
        x[index],
        x.at[index[:2]].set(y[:2]),
        x.at[index[1:3]].add(y[:2]),
        jax.lax.top_k(x.T, 2)[0].T.repeat(3, axis=0)[:LENGTH],
        jax.lax.cond(x[0, 0] > 0, lambda x: x[::-1], lambda x: x + y, x),
        jnp.clip(x, -0.5, 0.5),
        jax.lax.reduce_window(x, -np.inf, jax.lax.max, (2, 1), (1, 1), ((1, 0), (0, 0))),
        jnp.round(3 * x) + jnp.sign(y),
        jax.vmap(
            lambda n, row: jax.lax.while_loop(
                lambda s: s[0] < 2, lambda s: (2 * s[0] + 0.1, 0.5 * s[1] + row), (n, row)
            )[1]
        )(jnp.abs(x[:, 0]), y),
        jax.lax.sort((jnp.round(x), y), dimension=axis, num_keys=1)[1],
    ][rng.integers(17)]


SMOOTH = (_elementwise, _constant, _number, _moved, _reshaped, _reduced, _product, _looped)
CHOOSING = (*SMOOTH, _choosing, _choosing)


def program(seed: int, kinds, steps: int = 6):
    """Returns a function [LENGTH, 3] → [LENGTH, 3] with random steps, drawn with `seed`."""

    def run(x):
        rng = np.random.default_rng(seed)
        arrays = [x]
        for _ in range(steps):
            some, other = (arrays[rng.integers(len(arrays))] for _ in range(2))
            arrays.append(jnp.tanh(kinds[rng.integers(len(kinds))](rng, some, other)))
        return arrays[-1]

    return run
