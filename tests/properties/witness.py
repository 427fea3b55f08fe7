"""Which output of a model depends on which input, asked of the model itself, and held to a rule."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

cases = 0  # so many were held to a rule; the summary of a run has the sum over its tests


def exactly(found, rule):
    """No edge more than the rule's (an effect of NaN is an edge), and none less."""
    global cases
    cases += 1
    np.testing.assert_array_equal(np.asarray(found), rule)


def within(found, rule):
    """No edge more than the rule's: where an effect may be rounded away, or dropped."""
    global cases
    cases += 1
    spurious = np.asarray(found) & ~rule
    assert not spurious.any(), f"spurious edges: {np.argwhere(spurious).tolist()}"


def by_jacobian(function, x):
    """Where the derivative of output [batch, length] for input [batch, length, dim] is not 0."""
    y, pull_back = jax.vjp(function, x)
    (rows,) = jax.vmap(pull_back)(jnp.eye(y.size).reshape(y.size, *y.shape))
    return (rows != 0).any(axis=-1).reshape(*y.shape, *x.shape[:2])


def one_number(logits):
    """A number per position that every logit affects."""
    return logits @ jnp.cos(jnp.arange(logits.shape[-1]) + 1.0)


@cache
def jacobian(model, dropout=False, capture=None):
    def run(variables, x, segments, key, **read):
        def logits(x):
            if capture is not None:
                return model.apply(variables, x, segments, capture=capture, method="inspect")[0]
            rngs = {"dropout": key} if dropout else None
            return model.apply(variables, x, segments, rngs=rngs, **read)

        return by_jacobian(lambda x: one_number(logits(x)), x)

    return jax.jit(run)


@cache
def changed(model):
    """bool [batch, output, input]: does an output change, if by one bit, with that input of row 0?

    Input number `length`, out of range, changes nothing: one program runs them all."""

    def run(variables, x, segments, other, **read):
        def logits(j):
            return model.apply(variables, x.at[0, j].set(other, mode="drop"), segments, **read)

        y = jax.lax.map(logits, jnp.arange(x.shape[1] + 1))
        return (y[:-1] != y[-1]).any(axis=-1).transpose(1, 2, 0)

    return jax.jit(run)
