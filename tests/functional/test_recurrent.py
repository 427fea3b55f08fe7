"""Initialization of recurrent models."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.layers.recurrent import CELLS, init_recurrent_layer
from jaxformer.models.parameters import init

WIDTHS = st.sampled_from([64, 96])  # few widths, because each one compiles


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@settings(max_examples=6)
@given(WIDTHS, WIDTHS, st.integers(1, 2), st.integers(0, 99))
def test_initial_weights_of_recurrent_layers_give_input_projections_variance_1(
    cell, embed_dim, hidden_dim, num_layers, seed
):
    """Var(W x) = 1 in every layer, for token vectors of variance 1/dim and states of ±1.

    A smaller input would be lost beside the state; a larger one would saturate the gates.
    """
    config = jf.RecurrentConfig(
        vocab_size=256,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        num_layers=num_layers,
        cell=cell,
        tie_embeddings=False,
    )
    model = jf.build(config)
    weights = init(model, jax.random.key(seed))["params"]
    layers = model.architecture.stack.layer_trees(weights["blocks"])
    x = weights["embedding"]["tokens"]
    for layer in range(num_layers):
        projected = x @ layers[layer]["recurrent"]["input"]["kernel"]
        assert 0.75 < jnp.var(projected) < 1.3
        x = jax.random.rademacher(jax.random.key(seed), (256, hidden_dim), jnp.float32)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only the CPU backend uses LAPACK")
def test_recurrent_init_under_vmap_uses_no_batched_factorization():
    """Two batched LAPACK factorizations side by side deadlock on two threads.

    It happened when the seeds of an LSTM were mapped over.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    made = jax.jit(jax.vmap(lambda key: init_recurrent_layer(key, CELLS["lstm"], 5, 4)))
    batches = re.findall(r'@lapack_\w+.*num_batch_dims = "(\d+)"', made.lower(keys).as_text())
    assert batches and set(batches) == {"0"}
    alone = [init_recurrent_layer(key, CELLS["lstm"], 5, 4) for key in keys]
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), made(keys), together)


def test_cell_of_initial_recurrent_weights_may_be_a_name():
    key = jax.random.key(0)
    for name, cell in CELLS.items():
        found, expected = (init_recurrent_layer(key, x, 3, 4) for x in (name, cell))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(ValueError, match="cell is 'gru'; it must be rnn or lstm, or a Cell"):
        init_recurrent_layer(key, "gru", 3, 4)
