"""The feed-forward layer against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxformer.functional import feed_forward
from jaxformer.functional.feedforward import ACTIVATIONS, init_feed_forward
from tests.properties import oracle, tiny


def random_weights(seed, activation, use_bias=True):
    """Draws nonzero weights with the shapes of `init_feed_forward`."""
    shapes = init_feed_forward(jax.random.key(0), 6, 10, activation, use_bias=use_bias)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes)


@pytest.mark.parametrize("use_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(seed=tiny.seeds)
def test_it_is_its_formula(activation, use_bias, seed):
    """act(x W₁ + b₁) W₂ + b₂, gated for the gated activations, with both forms of GELU.

    `output_activation` applies the activation after the second map too, as in lecture 10.
    """
    weights, x = random_weights(seed, activation, use_bias), tiny.embeddings(seed, 3, 6)
    device = jax.tree.map(jnp.asarray, weights)
    for twice in (False, True):
        y = feed_forward(device, x, activation, output_activation=twice)
        exact = oracle.float64(weights)
        expected = oracle.feed_forward(exact, np.asarray(x, np.float64), activation, twice)
        tiny.close(y, expected, 1e-5)


@given(seed=tiny.seeds)
def test_positions_are_independent(seed):
    """The layer gives the same values position by position, under vmap, and mixes none."""
    weights = jax.tree.map(jnp.asarray, random_weights(seed, "swiglu"))
    x = tiny.embeddings(seed, 2, 3, 6)
    y = feed_forward(weights, x, "swiglu")
    alone = jax.vmap(jax.vmap(lambda x: feed_forward(weights, x, "swiglu")))(x)
    tiny.close(alone, y)
    changed = feed_forward(weights, x.at[1, 2].add(1.0), "swiglu")
    assert (np.asarray(y != changed).any(axis=-1) == [[0, 0, 0], [0, 0, 1]]).all()
