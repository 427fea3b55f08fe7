"""Measures which outputs of a model depend on which inputs, and compares them with a rule."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

cases = 0  # number of comparisons with a rule; the terminal summary adds it up over all tests


def exactly(found, rule):
    """Asserts that the dependencies equal the rule. A NaN derivative is a dependency."""
    global cases
    cases += 1
    np.testing.assert_array_equal(np.asarray(found), rule)


def within(found, rule):
    """Asserts that the rule has every dependency found: rounding or dropout may hide some."""
    global cases
    cases += 1
    spurious = np.asarray(found) & ~rule
    assert not spurious.any(), f"unexpected dependencies: {np.argwhere(spurious).tolist()}"


def by_jacobian(function, x):
    """Returns where the derivative of output [batch, length] by x [batch, length, dim] is not 0."""
    y, pull_back = jax.vjp(function, x)
    (rows,) = jax.vmap(pull_back)(jnp.eye(y.size).reshape(y.size, *y.shape))
    return (rows != 0).any(axis=-1).reshape(*y.shape, *x.shape[:2])


def one_number(logits):
    """Reduces the logits to one number per position that depends on every logit."""
    return logits @ jnp.cos(jnp.arange(logits.shape[-1]) + 1.0)


@cache
def jacobian(model, dropout=False, capture=None):
    def run(variables, x, segment_ids, key, **read):
        def logits(x):
            if capture is not None:
                return model.apply(variables, x, segment_ids, capture=capture, method="inspect")[0]
            rngs = {"dropout": key} if dropout else None
            return model.apply(variables, x, segment_ids, rngs=rngs, **read)

        return by_jacobian(lambda x: one_number(logits(x)), x)

    return jax.jit(run)


@cache
def changed(model):
    """Compiles a function that finds by change which outputs depend on which inputs.

    It returns bool [batch, output, input]: whether replacing that input of batch element 0 changes
    any bit of that output. It also runs input number `length`, out of range, which changes nothing:
    that is the baseline, computed by the same program.
    """

    def run(variables, x, segment_ids, other, **read):
        def logits(j):
            return model.apply(variables, x.at[0, j].set(other, mode="drop"), segment_ids, **read)

        y = jax.lax.map(logits, jnp.arange(x.shape[1] + 1))
        return (y[:-1] != y[-1]).any(axis=-1).transpose(1, 2, 0)

    return jax.jit(run)
