"""Helpers of the parity tests: random weights for torch models, and comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxformer.functional import cross_entropy

TOKENS = 512


def randomised(module):
    """Draws every parameter at random, so that none is zero or one. Returns the module."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return module.eval()


def weights(module):
    return lambda name: module.state_dict()[name].numpy()


def gradients(module):
    parameters = dict(module.named_parameters())
    return lambda name: parameters[name].grad.numpy()


def linear(take, name):
    """Converts a torch linear layer to jaxformer's weights, with a transposed kernel."""
    return {"kernel": take(f"{name}.weight").T, "bias": take(f"{name}.bias")}


def norm(take, name):
    return {"scale": take(f"{name}.weight"), "bias": take(f"{name}.bias")}


def stacked(blocks):
    """Stacks the blocks' trees along a new first axis, the layer."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)


def padded(length, *lengths):
    """Returns int [batch, length]: 1 for tokens, 0 for the padding after them."""
    return (np.arange(length) < np.array(lengths)[:, None]).astype(np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(ours, theirs, where):
    """Asserts that both arrays agree within 1e-4 where `where` is not 0."""
    ours, theirs = np.asarray(ours)[where != 0], theirs.detach().numpy()[where != 0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert abs(theirs).max() > 0.1  # values near 0 would agree trivially


def assert_parity(model, peer, converted):
    """Compares jaxformer's model with torch's `peer` in logits and gradients.

    Logits must agree within 1e-4, and the gradient of the loss within 1e-4 of the largest entry of
    each leaf. `converted(take)` makes our parameter tree from torch's parameters, and our gradient
    tree from torch's gradients.
    """
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, TOKENS))
    params = converted(weights(peer))

    theirs = peer(torch.as_tensor(tokens)).logits
    flat = theirs[:, :-1].reshape(-1, model.config.vocab_size)
    torch.nn.functional.cross_entropy(flat, torch.as_tensor(tokens[:, 1:]).reshape(-1)).backward()

    @jax.jit
    def ours(params):
        def loss(params):
            logits = model.apply({"params": params}, jnp.asarray(tokens))
            return cross_entropy(logits[:, :-1], jnp.asarray(tokens[:, 1:])), logits

        gradient, logits = jax.grad(loss, has_aux=True)(params)
        return logits, gradient

    logits, gradient = ours(params)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), rtol=0, atol=1e-4)
    expected = converted(gradients(peer))
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)

    largest = max(abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def compare(path, actual, expected):
        # Without rotation, a key bias shifts all scores of a query equally, so its gradient is 0 up
        # to rounding. Therefore the scale is at least a thousandth of the largest gradient.
        scale = max(abs(expected).max(), 1e-3 * largest)
        assert abs(actual - expected).max() <= 1e-4 * scale, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(compare, gradient, expected)
