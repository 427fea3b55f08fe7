"""LayerNorm, RMSNorm and attention equal torch's functions in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")

from jaxformer.functional import (  # noqa: E402
    Causal,
    dot_product_attention,
    layer_norm,
    rms_norm,
)


def assert_same(ours, theirs, arguments, tolerance=1e-4):
    """Compares the outputs and gradients of two functions of the same arrays."""
    tensors = [torch.tensor(x, requires_grad=True) for x in arguments]
    expected = theirs(*tensors)
    cotangent = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    expected.backward(torch.as_tensor(cotangent))
    actual, pull_back = jax.vjp(jax.jit(ours), *map(jnp.asarray, arguments))
    gradients = pull_back(jnp.asarray(cotangent))
    pairs = zip(
        (actual, *gradients),
        (expected.detach(), *(tensor.grad for tensor in tensors)),
        strict=True,
    )
    for mine, other in pairs:
        other = other.numpy()
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance * max(1, abs(other).max()))


def random(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_layer_norm_output_and_gradients_equal_torch(epsilon):
    """torch.nn.functional.layer_norm: population variance, epsilon inside the root."""
    x, scale, bias = random((7, 33), (33,), (33,))
    assert_same(
        lambda x, scale, bias: layer_norm(x, scale, bias, epsilon),
        lambda x, scale, bias: torch.nn.functional.layer_norm(x, (33,), scale, bias, epsilon),
        [3 * x + 5, scale, bias],
    )


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_rms_norm_output_and_gradients_equal_torch(epsilon):
    """torch.nn.functional.rms_norm, epsilon inside the root."""
    assert_same(
        lambda x, scale: rms_norm(x, scale, epsilon),
        lambda x, scale: torch.nn.functional.rms_norm(x, (33,), scale, epsilon),
        random((7, 33), (33,)),
    )


@pytest.mark.parametrize("implementation", ["explicit", "blockwise"])
@pytest.mark.parametrize("kind", ["causal", "table", "everyone"])
def test_attention_output_and_gradients_equal_torch(kind, implementation):
    """scaled_dot_product_attention with grouped heads: causal, a bool table, and no mask.

    150 queries make several blocks.
    """
    query, key, value = random((2, 6, 150, 8), (2, 3, 150, 8), (2, 3, 150, 5))
    table = np.random.default_rng(2).random((150, 150)) < 0.3
    table |= np.eye(150, dtype=bool)
    masks = {"causal": Causal(), "table": jnp.asarray(table), "everyone": None}
    told = {"is_causal": kind == "causal"}
    if kind == "table":
        told["attn_mask"] = torch.as_tensor(table)
    assert_same(
        lambda query, key, value: dot_product_attention(
            query, key, value, masks[kind], implementation=implementation
        ),
        lambda query, key, value: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=True, **told
        ),
        [query, key, value],
    )
