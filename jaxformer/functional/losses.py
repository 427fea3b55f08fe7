"""Cross-entropy: −log P(target), averaged over the tokens that count.

Everything here is float32 whatever the dtype of the logits. Output i is scored against target i:
shifting is the business of whoever makes the targets.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.kernels import Kernel
from jaxformer.functional.linear import capped, linear
from jaxformer.functional.spread import varying_alike


def token_losses(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """−Σ_v q_v log softmax(logits)_v in nats, q = (1 − ε) one-hot(target) + ε / vocab.

    A target outside 0 … vocab − 1 gives NaN rather than the loss of some other class.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    is_id = (targets >= 0) & (targets < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(is_id, targets, 0)[..., None], axis=-1)[..., 0]
    picked = jnp.where(is_id, picked, jnp.nan)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * logits.mean(axis=-1)
    return total - picked


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """Σ w_i loss_i / Σ w_i in nats per token; 0 where Σ w_i is 0.

    weights: 0 for what is not to be learnt (padding; such a target may be anything, −100 too),
    1 for what is. Averaged over valid tokens, not over rows: a batch of unequal lengths gives what
    its tokens give in any other arrangement. A target out of range that counts raises ValueError;
    inside jit it gives NaN.
    """
    _check_targets(logits.shape, targets, weights)
    losses = token_losses(logits, targets, label_smoothing)
    return _weighted_mean(*_weighted_sum(losses, weights))


def _check_targets(shape, targets, weights):
    """Refuse what does not fit logits of that shape and, where it is known (inside jit it gives
    NaN), a target that counts and is no class."""
    *batch, vocab_size = shape
    for name, given in (("targets", targets), ("weights", weights)):
        if given is not None and list(given.shape) != batch:
            raise ValueError(f"{name} are {given.shape}; outputs are {tuple(batch)}")
    if isinstance(targets, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        return
    counted = np.asarray(targets)
    if weights is not None:
        counted = counted[np.asarray(weights) != 0]
    outside = counted[(counted < 0) | (counted >= vocab_size)]
    if outside.size:
        raise ValueError(f"targets hold {outside[0]}; it must be in 0 … {vocab_size - 1}")


def _weighted_sum(losses, weights):
    if weights is None:
        return losses.sum(), jnp.float32(losses.size)
    weights = weights.astype(jnp.float32)
    return (weights * jnp.where(weights != 0, losses, 0.0)).sum(), weights.sum()


def _weighted_mean(total, count):
    return total / jnp.where(count == 0, 1.0, count)


def chunked_cross_entropy(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"] | Kernel,
    targets: Int[Array, "*batch length"],
    weights: Float[Array, "*batch length"] | None = None,
    *,
    bias: Float[Array, " vocab"] | None = None,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> Float[Array, ""]:
    """cross_entropy(hidden @ kernel + bias, …) without the logits of the whole batch in memory.

    cap: logits y are cap · tanh(y / cap); None: they are y.
    About `chunk` tokens are taken at a time, the same positions of all rows. When a gradient is
    wanted it is worked out in the same sweep, while a chunk's logits are at hand, so each product
    is computed once; what is kept is
    the gradient for `hidden`, `kernel` and `bias`, never [tokens, vocab] in float32.
    """
    _check_targets((*hidden.shape[:-1], kernel.shape[-1]), targets, weights)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    weights = weights.astype(jnp.float32)
    parts = _in_chunks(chunk, hidden, targets, weights)
    head = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
    head, parts = varying_alike(head, parts)
    total = _summed_losses(head, *parts, cap, label_smoothing)
    return _weighted_mean(total, weights.sum())


def chunked_token_losses(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"] | Kernel,
    targets: Int[Array, "*batch length"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    cap: float | None = None,
    chunk: int = 1024,
) -> Float[Array, "*batch length"]:
    """token_losses(hidden @ kernel + bias, targets), the logits of `chunk` tokens at a time."""
    parts = _in_chunks(chunk, hidden, targets)
    head = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}

    def of_part(part):
        return token_losses(_logits(head, cap, part[0]), part[1])

    return _joined(jax.lax.map(of_part, parts), targets.shape[-1])


def _in_chunks(chunk, hidden, *by_token):
    """Each [chunks, *batch, size, …], filled up with zeros, where a chunk has about `chunk` tokens:
    so many positions of all rows; hidden [*batch, length, dim], the others [*batch, length].

    Along the length, and not through the rows one after another: a batch that is spread over
    devices stays where it is.
    """
    *batch, length, _ = hidden.shape
    positions = max(1, chunk // max(1, math.prod(batch)))
    chunks = max(1, -(-length // positions))
    size, axis = -(-length // chunks), len(batch)

    def cut(x):
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, chunks * size - length)
        x = jnp.pad(x, padding).reshape(*batch, chunks, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return cut(hidden), *map(cut, by_token)


def _joined(losses, length: int):
    """[chunks, *batch, size] → [*batch, length]."""
    losses = jnp.moveaxis(losses, 0, -2)
    return losses.reshape(*losses.shape[:-2], -1)[..., :length]


def _logits(head, cap, hidden):
    return capped(linear(head, hidden, jnp.float32), cap)


def _chunk_loss(learnt, fixed, targets, weights, cap, label_smoothing):
    """learnt: (hidden, the floats of the head); fixed: the rest of it, as it is."""
    hidden, floats = learnt
    head = jax.tree.map(lambda x, y: y if x is None else x, floats, fixed, is_leaf=_is_none)
    logits = _logits(head, cap, hidden)
    losses = token_losses(logits, targets, label_smoothing)
    return _weighted_sum(losses, weights)[0], losses


def _is_none(x) -> bool:
    return x is None


def _floats_and_others(tree):
    """The tree twice, with None where the other has something: integers have no gradient."""
    is_float = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree)
    return (
        jax.tree.map(lambda x, wanted, side=side: x if wanted == side else None, tree, is_float)
        for side in (True, False)
    )


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed_losses(head, hidden, targets, weights, cap, label_smoothing):
    floats, fixed = _floats_and_others(head)

    def step(total, part):
        hidden, targets, weights = part
        loss, _ = _chunk_loss((hidden, floats), fixed, targets, weights, cap, label_smoothing)
        return total + loss, None

    zero, _ = varying_alike(jnp.float32(0), hidden)
    return jax.lax.scan(step, zero, (hidden, targets, weights))[0]


def _summed_losses_forward(head, hidden, targets, weights, cap, label_smoothing):
    floats, fixed = _floats_and_others(head)
    gradient = jax.value_and_grad(_chunk_loss, has_aux=True)

    def step(carry, part):
        hidden, targets, weights = part
        (loss, losses), (d_hidden, d_head) = gradient(
            (hidden, floats), fixed, targets, weights, cap, label_smoothing
        )
        total, d_total = carry
        # What the sum changes by with a weight is that token's loss.
        d_weights = jnp.where(weights != 0, losses, 0.0)
        return (total + loss, jax.tree.map(jnp.add, d_total, d_head)), (d_hidden, d_weights)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), floats)
    start, _ = varying_alike((jnp.float32(0), zeros), hidden)
    (total, d_head), by_token = jax.lax.scan(step, start, (hidden, targets, weights))
    d_head = jax.tree.map(lambda d, x: d.astype(x.dtype), d_head, floats)
    return total, (d_head, *by_token)


def _summed_losses_backward(label_smoothing, gradients, cotangent):
    gradients = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    d_head, d_hidden, d_weights = gradients
    return d_head, d_hidden, None, d_weights, None


_summed_losses.defvjp(_summed_losses_forward, _summed_losses_backward)
