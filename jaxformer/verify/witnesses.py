"""Which output depends on which input, asked of a function in three ways.

Each witness takes a function of one array and says, for pairs of an output's and an input's
position, how large an effect it saw: exactly 0.0 is none, and NaN counts as an effect without
measure, ∞. Positions are numbered along the rows of the leading axes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.verify.taint import taint


def by_taint(function, inputs, num_positions: int):
    """bool [outputs, inputs]: is there a path at all? And remarks: see `taint`."""
    found, remarks = taint(function, inputs, num_positions)
    outputs = int(np.prod(found.shape[:num_positions]))
    return found.reshape(outputs, -1, found.shape[-1]).any(axis=1), remarks


def by_derivative(function, inputs, num_positions: int, rows, chunk: int = 16):
    """float [rows, inputs]: the largest |∂ output / ∂ a feature of the input|, by vjp.

    Of each output position's features one number is made that every one affects, so that a
    row of the Jacobian is one backward pass, and `chunk` of them run at once.
    """

    def one_per_position(x):
        y = function(x)
        y = y.reshape(*y.shape[:num_positions], -1).astype(jnp.float32)
        return (y @ jnp.cos(jnp.arange(y.shape[-1]) + 1.0)).reshape(-1)

    @jax.jit
    def run(x, rows):
        y, pull_back = jax.vjp(one_per_position, x)

        def effect(row):
            (gradient,) = pull_back(jnp.zeros_like(y).at[row].set(1.0))
            return _largest(gradient.reshape(*x.shape[:num_positions], -1), num_positions)

        return jax.lax.map(effect, rows, batch_size=chunk)

    return np.asarray(run(inputs, jnp.asarray(rows)))


def by_change(function, inputs, num_positions: int, columns, others):
    """float [outputs, columns]: how much an output changes, bit by bit, once one input is another.

    others: as inputs, what to put in place. Two results that differ and whose difference is rounded
    away count as the smallest number there is.
    """
    shape = inputs.shape[:num_positions]
    features = (1,) * (inputs.ndim - num_positions)

    @jax.jit
    def run(x, others, columns):
        def step(y, column):
            here = (jnp.arange(np.prod(shape)) == column).reshape(*shape, *features)
            z = function(jnp.where(here, others, x))
            y = jnp.where(column < 0, z, y)
            same = (y == z) | ((y != y) & (z != z))
            by = jnp.abs(z.astype(jnp.float32) - y.astype(jnp.float32))
            by = jnp.where(same, 0.0, jnp.maximum(by, jnp.finfo(jnp.float32).tiny))
            return y, _largest(by.reshape(*y.shape[:num_positions], -1), num_positions)

        # The first, −1, changes nothing: what the others are compared with must be found by the
        # same program, or it may be rounded otherwise.
        shapes = jax.eval_shape(function, x)
        empty = jnp.zeros(shapes.shape, shapes.dtype)
        return jax.lax.scan(step, empty, jnp.append(-1, columns))[1][1:]

    return np.asarray(run(inputs, others, jnp.asarray(columns))).T


def _largest(x, num_positions: int):
    """[positions]: the largest |feature|; NaN is ∞."""
    sizes = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x).astype(jnp.float32))
    return sizes.max(axis=range(num_positions, x.ndim), initial=0.0).reshape(-1)
