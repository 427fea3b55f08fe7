"""Gradients store the inputs of norms and activations, not the float32 values between steps."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import feed_forward, layer_norm, rms_norm
from jaxformer.functional.layers.feedforward import activate, init_feed_forward
from jaxformer.functional.linear import products
from jaxformer.functional.recomputed import recomputed
from tests.properties import tiny
from tests.slow import mostly_slow


def stored(function, *args):
    """Returns the arrays that the gradient of a function stores."""
    return jax.tree.leaves(jax.vjp(function, *args)[1])


def num_bytes(arrays):
    return sum(x.nbytes for x in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], "bfloat16"))
@settings(max_examples=6)  # each example compiles
@given(seed=tiny.seeds, rows=st.integers(1, 40), dim=st.integers(1, 40))
def test_recomputed_function_stores_only_its_arguments_for_the_gradient(dtype, seed, rows, dim):
    """However many steps a function has, its gradient needs no more memory than its arguments."""
    x = tiny.embeddings(seed, rows, dim).astype(dtype)
    scale, bias = jnp.ones(dim), jnp.zeros(dim)
    assert num_bytes(stored(layer_norm, x, scale, bias)) <= num_bytes([x, scale, bias])
    assert num_bytes(stored(lambda x, scale: rms_norm(x, scale), x, scale)) <= num_bytes([x, scale])
    assert num_bytes(stored(lambda x: activate(x, "gelu_tanh"), x)) <= num_bytes([x])


@given(seed=tiny.seeds)
def test_recomputed_function_receives_non_array_arguments_unchanged(seed):
    """Words, numbers, keywords and None reach the function unchanged; gradients are the same."""
    x = tiny.embeddings(seed, 3, 5)

    def formula(x, power, tables, word=None, *, more=None):
        assert (type(power), word, more) == (int, "word", None)
        return jnp.sin(x) ** power * tables["scale"]

    arguments = (x, 3, {"scale": jnp.float32(2)}, "word")
    cotangent = tiny.embeddings(seed + 1, 3, 5)
    for made in (formula, recomputed(formula)):
        y, pull = jax.vjp(lambda x, made=made: made(x, *arguments[1:], more=None), x)
        tiny.close(y, formula(*arguments), 1e-6)
        tiny.close(pull(cotangent)[0], 6 * jnp.sin(x) ** 2 * jnp.cos(x) * cotangent, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("on_bfloat16", [False, True])
@pytest.mark.parametrize("activation, expected", [("gelu_tanh", 2), ("swiglu", 3)])
def test_feed_forward_stores_each_hidden_array_once_for_the_gradient(
    activation, expected, on_bfloat16, monkeypatch
):
    """These are the results of the first maps and the input of the last, in the dtype of x."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: on_bfloat16)
    weights = init_feed_forward(jax.random.key(0), 8, 64, activation, use_bias=False)
    x = tiny.embeddings(0, 32, 8).astype(jnp.bfloat16)
    arrays = stored(lambda weights, x: feed_forward(weights, x, activation), weights, x)
    of_tokens = [y for y in arrays if len(y) == 32]
    assert {y.dtype for y in of_tokens} == {x.dtype}
    assert sum(y.shape == (32, 64) for y in of_tokens) == expected


@pytest.mark.parametrize(
    "norm, activation",
    mostly_slow([("rms", "swiglu"), ("layer", "gelu_tanh")], slow=[("rms", "swiglu")]),
)
def test_a_scan_over_layers_stores_no_float32_activations(norm, activation):
    """Training in bfloat16 stores bfloat16, except one number for each query and head."""
    config = jf.DecoderConfig(
        vocab_size=11,
        max_length=32,
        num_layers=3,
        embed_dim=24,
        num_heads=3,
        norm=norm,
        activation=activation,
        dtype="bfloat16",
    )
    model = jf.Decoder(config, jf.Execution(layers="scan", attention="blockwise"))
    tokens = jnp.zeros((2, 32), jnp.int32)
    variables = model.init(jax.random.key(0), tokens)

    def hidden(params):
        return model.apply({"params": params}, tokens, method="hidden_states")

    for x in stored(hidden, variables["params"]):
        if x.dtype == jnp.float32 and x.ndim > 2 and len(x) == config.num_layers:
            assert x.size == config.num_layers * tokens.size * config.num_heads, x.shape
