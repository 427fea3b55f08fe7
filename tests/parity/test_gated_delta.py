"""`GatedDelta` equals the layer of Qwen3-Next in transformers, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

from jaxformer.functional import GatedDelta  # noqa: E402
from jaxformer.functional.attention.token_info import TokenInfo  # noqa: E402
from jaxformer.functional.inputs import Run  # noqa: E402
from jaxformer.functional.layers.sublayer import At  # noqa: E402
from jaxformer.functional.tokens import Tokens  # noqa: E402
from jaxformer.models.config import Execution  # noqa: E402
from tests.parity.peers import gradients, randomised, weights  # noqa: E402

DIM = 12
SIZES = [  # key heads, value heads, key width, value width, kernel size
    (1, 1, 4, 4, 2),
    (2, 4, 6, 5, 4),
    (3, 3, 4, 8, 3),
]


def converted(take, layer):
    """Converts the parameters, which theirs holds by key head: [q, k, v …, z …] and [b …, a …]."""
    group, heads = layer.num_value_heads // layer.num_key_heads, layer.num_key_heads
    keys, values = layer.key_dim, group * layer.value_dim
    joined = take("in_proj_qkvz.weight").reshape(heads, -1, DIM)
    query, key, value, gate = np.split(joined, np.cumsum([keys, keys, values]), axis=1)
    rate, decay = np.split(take("in_proj_ba.weight").reshape(heads, -1, DIM), [group], axis=1)
    maps = {"query": query, "key": key, "value": value, "gate": gate, "rate": rate, "decay": decay}
    kernels = {name: {"kernel": x.reshape(-1, DIM).T} for name, x in maps.items()}
    kernels["decay"] |= {"bias": take("dt_bias"), "log_scale": take("A_log")}
    return {
        **kernels,
        "convolution": {"filter": take("conv1d.weight")[:, 0].T},
        "norm": {"scale": take("norm.weight")},
        "output": {"kernel": take("out_proj.weight").T},
    }


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [9, 64, 65, 130])
def test_gated_delta_layer_output_and_gradient_equal_qwen3_next(sizes, length):
    """The lengths include values below, at and above the block size of 64 tokens."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    layer = GatedDelta(*sizes)
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    options = {f"linear_{name}": size for name, size in zip(names, sizes, strict=False)}
    config = transformers.Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_conv_kernel_dim=layer.kernel_size,
        rms_norm_eps=layer.epsilon,
        **options,
    )
    peer = randomised(Qwen3NextGatedDeltaNet(config, 0))
    x = np.random.default_rng(0).normal(size=(2, length, DIM)).astype(np.float32)
    theirs = peer(torch.as_tensor(x))
    theirs.square().sum().backward()
    tokens = Tokens(TokenInfo(length), Run(Execution()))

    def ours(params):
        return layer(params, jnp.asarray(x), At(layer.context(tokens, {}))).x

    params = converted(weights(peer), layer)
    y = jax.jit(ours)(params)
    scale = max(1.0, abs(theirs.detach().numpy()).max())
    np.testing.assert_allclose(y, theirs.detach(), atol=1e-4 * scale)
    gradient = jax.jit(jax.grad(lambda params: jnp.square(ours(params)).sum()))(params)
    expected = converted(gradients(peer), layer)
    for mine, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert abs(mine - other).max() <= 1e-3 * max(1, abs(other).max())
