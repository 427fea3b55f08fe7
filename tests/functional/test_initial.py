"""At initialization, signal and gradient have a similar size in every layer of a stack."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.functional import cross_entropy
from jaxformer.functional.layers import feedforward
from jaxformer.functional.layers.feedforward import FeedForward, activate, activation_power
from jaxformer.functional.layers.plain import Preserving
from jaxformer.functional.layers.sublayer import At, Initial
from jaxformer.models.builders.transformers import build_stack
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
WIDTH, LENGTH, VOCABULARY = 32, 32, 128
BASE = jf.DecoderConfig(
    vocab_size=VOCABULARY, max_length=LENGTH, embed_dim=WIDTH, num_heads=1, use_bias=False
)
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
DEEP = [
    {"residual": residual, "norm": norm, "activation": activation, "num_layers": depth}
    for residual, norm, activation, depth in product(
        (True, False), ("rms", "none"), ACTIVATIONS, (4, 16)
    )
    # A gate squares the magnitude of its input: no depth is stable without norm and residual.
    if residual or norm != "none" or activation != "swiglu"
]
OTHERS = [
    {"residual": False, "norm": "none", "activation": "relu", "num_layers": 4, **change}
    for change in (
        {"activation": "swiglu", "num_layers": 2},
        {"num_experts": 8},
        {"num_experts": 8, "shared_expert_dim": 32},
        {"num_experts": (8, 0), "shared_expert_dim": 32, "shared_expert_gate": True},
        {"num_experts": 8, "experts_per_token": 4, "normalize_router": False},
        {"num_heads": 4},
        {"num_heads": 4, "num_kv_heads": 2},
        {"attention_gate": True},
        {"layer_types": "gated_delta", "num_heads": 4},
        {"output_activation": True, "attention_scale": 1.0},
        {"positions": "sinusoidal"},
        {"positions": "rotary", "scale_embeddings": True},
        {"norm": "layer", "norm_position": "post"},
        {"norm": "layer", "norm_position": "post_sublayer"},
        {"use_bias": True, "tie_embeddings": False},
    )
]
CASES = DEEP + OTHERS


def sizes(config):
    """Returns each layer's output (RMS) and gradient (norm), and the loss above a uniform guess."""
    tokens = jax.random.randint(jax.random.key(1), (4, LENGTH + 1), 0, VOCABULARY)
    model = jf.build(config, jf.Execution(layers="scan"))

    @jax.jit
    def measured(key):
        variables = model.init(key, tokens[:, :-1])

        def loss(variables):
            logits, found = model.apply(
                variables, tokens[:, :-1], capture=("block.output",), method="inspect"
            )
            return cross_entropy(logits, tokens[:, 1:]).mean(), found["block.output"]

        (value, outputs), gradient = jax.value_and_grad(loss, has_aux=True)(variables)
        blocks = jax.tree.leaves(gradient["params"]["blocks"])
        squares = sum((x**2).reshape(len(x), -1).sum(axis=1) for x in blocks)
        return jnp.sqrt((outputs**2).mean(axis=(1, 2, 3))), jnp.sqrt(squares), value

    outputs, gradients, value = map(np.asarray, measured(jax.random.key(0)))
    return outputs, gradients, value - np.log(VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", mostly_slow(CASES, DEEP[-1]), ids=lambda x: " ".join(map(str, x.values()))
)
def test_initial_signal_and_gradient_keep_their_size_over_depth(changes):
    """Holds with or without residuals and norms, for every activation and depth."""
    outputs, gradients, above = sizes(replace(BASE, **changes))
    assert outputs.min() > 1e-2 and outputs.max() < 30, outputs
    assert gradients.min() > 1e-5 and gradients.max() < 1000, gradients
    assert abs(above) < 6


@pytest.mark.slow
def test_a_stack_with_residual_and_norm_is_initialized_like_gpt_2():
    """N(0, 0.02²), and 0.02/√(2 · num_layers) for projections into the residual stream."""
    blocks = build_stack(replace(BASE, num_layers=8).resolved).init(jax.random.key(0))
    for part, name, stddev in (
        *(("attention", name, 0.02) for name in ("query", "key", "value")),
        ("attention", "output", 0.005),
        ("feedforward", "up", 0.02),
        ("feedforward", "down", 0.005),
    ):
        kernel = blocks[part][name]["kernel"]
        np.testing.assert_allclose(kernel.std(), stddev, rtol=0.05)


@pytest.mark.parametrize("name", feedforward.ACTIVATIONS)
def test_activation_power_is_the_mean_square_of_the_activation_of_standard_normal_inputs(name):
    z, weights = np.polynomial.hermite_e.hermegauss(200)
    power = (weights * np.asarray(activate(jnp.asarray(z), name)) ** 2).sum() / weights.sum()
    np.testing.assert_allclose(activation_power(name), power, rtol=2e-3)


@pytest.mark.parametrize("name", feedforward.ACTIVATIONS)
def test_activation_power_computed_from_a_function_equals_the_tabulated_value(name):
    power = jax.jit(lambda: activation_power(lambda z: activate(z, name)))()
    np.testing.assert_allclose(power, activation_power(name), rtol=1e-3)


@pytest.mark.parametrize("activation", ["relu", lambda z: 0.1 * z, jnp.sin, jnp.square])
def test_user_defined_activation_preserves_signal_variance(activation):
    """Without a residual, an output has the variance 1 of the input, whatever the function."""
    layer, x = FeedForward(64, activation), jax.random.normal(jax.random.key(1), (400, 64))
    weights = jax.jit(lambda key: layer.init(key, 64, Preserving(8)))(jax.random.key(0))
    np.testing.assert_allclose(jnp.square(layer(weights, x, At(None)).x).mean(), 1, rtol=0.2)
    gpt2 = layer.init(jax.random.key(0), 64, Initial(8))["down"]["kernel"].std()
    np.testing.assert_allclose(gpt2, 0.005, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer", "none"])
def test_convolutions_without_residual_preserve_signal_variance_at_initialization(norm):
    config = jf.ConvolutionalConfig(
        vocab_size=VOCABULARY, max_length=LENGTH, num_layers=8, embed_dim=WIDTH, residual=False
    )
    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCABULARY)
    model = jf.build(replace(config, norm=norm))
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    found = jf.inspect(model, variables, tokens, capture=("block.output",)).captured
    size = np.sqrt((np.asarray(found["block.output"]) ** 2).mean(axis=(1, 2, 3)))
    assert size.min() > 0.1 and size.max() < 10
