"""Training with 8-bit products by qwix, which replaces products inside `apply`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf

qwix = pytest.importorskip("qwix", reason="needs qwix")

SIZES = {"vocab_size": 17, "max_length": 16, "num_layers": 2, "embed_dim": 32, "num_heads": 4}
TOKENS = (np.arange(4 * 16) % 7).reshape(4, 16).astype(np.int32)


def in_8_bits(model, weights, gradients):
    rule = qwix.QtRule(weight_qtype=weights, act_qtype=weights, bwd_qtype=gradients)
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def trained(model, steps: int = 80):
    """Returns the losses of a short run and the program of its step."""
    variables, optimizer = model.init(jax.random.key(0), TOKENS[:, :-1]), optax.adam(1e-2)

    def loss(variables):
        logits = model.apply(variables, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    @jax.jit
    def step(variables, moments):
        value, gradients = jax.value_and_grad(loss)(variables)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(variables, updates), moments, value

    moments, losses = optimizer.init(variables), []
    text = step.lower(variables, moments).as_text()
    for _ in range(steps):
        variables, moments, value = step(variables, moments)
        losses.append(float(value))
    return losses, text


@pytest.mark.parametrize(
    "weights, gradients, name",
    [(jnp.float8_e4m3fn, jnp.float8_e5m2, "f8"), (jnp.int8, jnp.int8, "i8")],
    ids=["float8", "int8"],
)
def test_qwix_training_uses_8_bit_products_and_reduces_the_loss(weights, gradients, name):
    """The three products of each of the 9 matrices, where query, key and value are one."""
    model = jf.Decoder(jf.DecoderConfig(**SIZES, dtype="bfloat16"))
    plain, _ = trained(model)
    losses, text = trained(in_8_bits(model, weights, gradients))
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    assert plain[-1] < 0.1 and losses[-1] < 0.1
    products = re.findall(r"dot_general .*: \(tensor<(\w+)>, tensor<(\w+)>\)", text)
    of_weights = [pair for pair in products if all(x.count("x") == 2 for x in pair)]
    assert len(of_weights) == 3 * 9
    assert all(x.split("x")[-1].lower().startswith(name) for pair in of_weights for x in pair)
