"""Comparison of optimizers with those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer

torch = pytest.importorskip("torch")
optimization = pytest.importorskip("transformers.optimization")


def test_adafactor_updates_stacked_layers_like_transformers():
    """transformers has one parameter per layer; the layers differ in scale by 100."""
    rng, rate, shape = np.random.default_rng(0), 0.01, (128, 256)
    scales = (0.002, 0.02, 0.2)
    before = np.stack([scale * rng.normal(size=shape) for scale in scales]).astype(np.float32)
    gradients = [np.float32(rng.normal(size=before.shape)) for _ in range(4)]
    optimizer = make_optimizer(
        OptimizerConfig(optimizer="adafactor", weight_decay=0.0, clip_norm=1e9)
    )
    params = {"blocks": {"up": {"kernel": jnp.asarray(before)}}}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update({"blocks": {"up": {"kernel": gradient}}}, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda x: rate * x, updates))
    for layer, after in enumerate(params["blocks"]["up"]["kernel"]):
        weight = torch.nn.Parameter(torch.tensor(before[layer]))
        theirs = optimization.Adafactor(
            [weight], lr=rate, scale_parameter=True, relative_step=False, warmup_init=False
        )
        for gradient in gradients:
            weight.grad = torch.tensor(gradient[layer])
            theirs.step()
        moved = weight.detach().numpy() - before[layer]
        np.testing.assert_allclose(after - before[layer], moved, atol=1e-2 * np.abs(moved).max())
