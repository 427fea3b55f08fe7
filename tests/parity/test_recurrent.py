"""Recurrent layers and convolutions equal torch.nn in values and gradients, with padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch, which is not installed")

from jaxformer.functional.layers.convolution import (  # noqa: E402
    causal_offsets,
    convolution,
)
from jaxformer.functional.layers.recurrent import (  # noqa: E402
    CELLS,
    Recurrent,
    Times,
    recurrent_layer,
)
from tests.parity.peers import gradients, randomised, weights  # noqa: E402

BATCH, LENGTH, DIM, HIDDEN, LAYERS = 3, 40, 7, 5, 2
LENGTHS = np.array([40, 23, 1])


def converted(take):
    """Converts the parameters; jaxformer's bias is the sum of torch's two biases."""
    return [
        {
            "input": {
                "kernel": take(f"weight_ih_l{layer}").T,
                "bias": take(f"bias_ih_l{layer}") + take(f"bias_hh_l{layer}"),
            },
            "state": {"kernel": take(f"weight_hh_l{layer}").T},
        }
        for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_recurrent_layer_outputs_and_gradients_equal_torch(cell):
    """torch.nn.RNN and LSTM on a padded batch: outputs, final states and gradients."""
    peer = randomised(
        {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM}[cell](DIM, HIDDEN, LAYERS, batch_first=True)
    )
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM)).astype(np.float32)
    valid = np.arange(LENGTH) < LENGTHS[:, None]
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.as_tensor(x), torch.as_tensor(LENGTHS), batch_first=True
    )
    theirs, last = peer(packed)
    theirs, _ = torch.nn.utils.rnn.pad_packed_sequence(theirs, batch_first=True)
    theirs.square().sum().backward()
    states = [Recurrent(CELLS[cell], HIDDEN).zeros(BATCH) for _ in range(LAYERS)]

    times = Times(valid=jnp.asarray(valid))

    def ours(layers):
        y, after = jnp.asarray(x), []
        for layer, state in zip(layers, states, strict=True):
            y, state, _ = recurrent_layer(layer, y, state, times=times, cell=CELLS[cell])
            after.append(state)
        return y, after

    params = converted(weights(peer))
    y, after = jax.jit(ours)(params)
    np.testing.assert_allclose(y, theirs.detach(), atol=1e-4)
    last = last if cell == "lstm" else (last,)
    for layer in range(LAYERS):
        for mine, other in zip(after[layer], last, strict=True):
            np.testing.assert_allclose(mine, other[layer].detach(), atol=1e-4)
    gradient = jax.jit(jax.grad(lambda layers: jnp.square(ours(layers)[0]).sum()))(params)
    expected = converted(gradients(peer))
    for layer in expected:
        layer["input"]["bias"] = layer["input"]["bias"] / 2
    for mine, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert abs(mine - other).max() <= 1e-4 * max(1, abs(other).max())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel_size, dilation", [(3, 1), (5, 2), (1, 1)])
def test_convolution_output_and_gradients_equal_torch(causal, kernel_size, dilation):
    """torch.nn.Conv1d, padded on the left (causal) or on both sides (centred)."""
    peer = randomised(torch.nn.Conv1d(DIM, HIDDEN, kernel_size, dilation=dilation))
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM)).astype(np.float32)
    reach = dilation * (kernel_size - 1)
    sides = (reach, 0) if causal else (reach // 2, reach // 2)
    theirs = peer(torch.nn.functional.pad(torch.as_tensor(x).transpose(1, 2), sides))
    theirs.square().sum().backward()

    def params(take):
        return {
            "kernel": take("weight").transpose(2, 1, 0).reshape(-1, HIDDEN),
            "bias": take("bias"),
        }

    def ours(weights):
        offsets = causal_offsets(kernel_size, dilation)
        if not causal:  # centred
            offsets = tuple(offset + reach // 2 for offset in offsets)
        return convolution(weights, jnp.asarray(x), offsets)

    y = jax.jit(ours)(params(weights(peer)))
    np.testing.assert_allclose(y, theirs.detach().transpose(1, 2), atol=1e-4)
    gradient = jax.grad(lambda weights: jnp.square(ours(weights)).sum())(params(weights(peer)))
    for mine, other in zip(*map(jax.tree.leaves, (gradient, params(gradients(peer)))), strict=True):
        assert abs(mine - other).max() <= 1e-4 * max(1, abs(other).max())
