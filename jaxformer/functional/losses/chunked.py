"""Cross-entropy of hidden states, with the head applied in chunks of tokens."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer, Shaped

from jaxformer.functional.arguments import checks_arguments, whole_number
from jaxformer.functional.linear.affine import linear, soft_cap
from jaxformer.functional.linear.kernels import Kernel
from jaxformer.functional.losses.cross_entropy import (
    check_smoothing,
    check_targets,
    smoothed_and_plain,
    token_losses,
    weighted_mean,
    weighted_sum,
)
from jaxformer.functional.own_gradient import own_gradient
from jaxformer.functional.placement import vary_alike

# The kernel and the optional bias of the output head.
Head = dict[str, Any]


class Losses(NamedTuple):
    """Weighted sums of token losses.

    Attributes:
        loss: the weighted sum of the losses with label smoothing.
        unsmoothed: the weighted sum of the losses without label smoothing, for comparison with
            other losses; the gradient of `unsmoothed` is zero.
    """

    loss: Float[Array, ""]
    unsmoothed: Float[Array, ""]


def _check_chunks(
    hidden: Float[Any, "*hidden"],
    kernel: Any,
    targets: Integer[Any, "*batch"],
    weights: Shaped[Any, "*weighted"] | None,
    label_smoothing: float,
    chunk: int,
    **_: object,
) -> None:
    check_smoothing(label_smoothing)
    check_targets((*hidden.shape[:-1], kernel.shape[-1]), targets, weights)
    whole_number("chunk", chunk, 1)


@checks_arguments(_check_chunks)
def chunked_cross_entropy(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"] | Kernel,
    targets: Integer[Array, "*batch length"],
    weights: Shaped[Array, "*batch length"] | None = None,
    *,
    bias: Float[Array, " vocab"] | None = None,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> Float[Array, ""]:
    """Computes cross_entropy(hidden @ kernel + bias, …) without storing all logits.

    A chunk has about `chunk` tokens, at the same positions of all sequences. Under
    differentiation, one loop over chunks computes losses and gradients, so the logits of a chunk
    are computed only once. The loop stores the gradients of `hidden`, `kernel` and `bias`, never a
    float32 array [tokens, vocab].

    Args:
        hidden: the input of the head.
        kernel: the kernel of the head.
        targets: see `cross_entropy`.
        weights: see `cross_entropy`.
        bias: the bias of the head, or None.
        cap: soft cap of the logits, which replaces y by cap · tanh(y / cap), or None.
        label_smoothing: see `token_losses`.
        chunk: the number of tokens of a chunk.
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    weights = weights.astype(jnp.float32)
    # The weights are divided by their sum, so that gradients need not be scaled later.
    shares = weighted_mean(weights, weights.sum())
    sums = chunked_weighted_sums(
        hidden, kernel, targets, shares, bias, cap, label_smoothing, chunk=chunk
    )
    return sums.loss


def chunked_weighted_sums(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"] | Kernel,
    targets: Integer[Array, "*batch length"],
    weights: Float[Array, "*batch length"],
    bias: Float[Array, " vocab"] | None,
    cap: float | None,
    label_smoothing: float,
    chunk: int = 1024,
) -> Losses:
    """Computes Σ w_i loss_i with and without label smoothing; see `chunked_cross_entropy`."""
    parts = _in_chunks(chunk, hidden, targets, weights)
    head = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
    losses = own_gradient(
        partial(_summed_losses, label_smoothing),
        partial(_summed_losses_forward, label_smoothing),
        _summed_losses_backward,
    )
    return losses(head, *parts, cap)


def chunked_token_losses(
    hidden: Float[Array, "*batch length dim"],
    kernel: Float[Array, "dim vocab"] | Kernel,
    targets: Int[Array, "*batch length"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    cap: float | None = None,
    chunk: int = 1024,
) -> Float[Array, "*batch length"]:
    """Computes token_losses(hidden @ kernel + bias, targets), about `chunk` tokens at a time."""
    parts = _in_chunks(chunk, hidden, targets)
    head = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}

    def chunk_losses(
        part: tuple[Float[Array, "*batch size dim"], Int[Array, "*batch size"]],
    ) -> Float[Array, "*batch size"]:
        return token_losses(_logits(head, cap, part[0]), part[1])

    return _joined(jax.lax.map(chunk_losses, parts), targets.shape[-1])


def _in_chunks(
    chunk: int, hidden: Float[Array, "*batch length dim"], *by_token: Shaped[Array, "*batch length"]
) -> tuple[Shaped[Array, "..."], ...]:
    """Splits arrays along the length into chunks of about `chunk` tokens, padded with zeros.

    The results are [chunks, *batch, size, …], where each chunk has `size` positions of all
    sequences. `hidden` is [*batch, length, dim], and the arrays of `by_token` are [*batch, length].
    The split is along the length, so that a batch that is sharded over devices need not move.
    """
    *batch, length, _ = hidden.shape
    positions = max(1, chunk // max(1, math.prod(batch)))
    chunks = max(1, -(-length // positions))
    size, axis = -(-length // chunks), len(batch)

    def cut(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, chunks * size - length)
        x = jnp.pad(x, padding).reshape(*batch, chunks, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return cut(hidden), *map(cut, by_token)


def _joined(
    losses: Float[Array, "chunks *batch size"], length: int
) -> Float[Array, "*batch length"]:
    """Concatenates the losses of the chunks along the length, and removes the padding."""
    losses = jnp.moveaxis(losses, 0, -2)
    return losses.reshape(*losses.shape[:-2], -1)[..., :length]


def _logits(
    head: Head, cap: float | None, hidden: Float[Array, "*batch dim"]
) -> Float[Array, "*batch vocab"]:
    return soft_cap(linear(head, hidden, jnp.float32), cap)


def _chunk_loss(
    products: Float[Array, "*batch vocab"],
    bias: Float[Array, " vocab"] | None,
    targets: Integer[Array, "*batch"],
    weights: Float[Array, "*batch"],
    cap: float | None,
    label_smoothing: float,
) -> tuple[Float[Array, ""], tuple[Float[Array, "*batch"], Float[Array, ""]]]:
    """Computes the losses of a chunk from float32 products hidden @ kernel.

    Returns:
        (sum of the losses, (loss of each token, sum of the losses without label smoothing)).
    """
    logits = products if bias is None else products + bias.astype(products.dtype)
    losses, plain = smoothed_and_plain(soft_cap(logits, cap), targets, label_smoothing)
    return weighted_sum(losses, weights)[0], (losses, weighted_sum(plain, weights)[0])


def _multiply(
    floats: Head, fixed: Head, hidden: Float[Array, "*batch dim"], dtype: DTypeLike
) -> Float[Array, "*batch vocab"]:
    """Computes hidden @ kernel for a kernel that is split into float leaves and other leaves."""
    head = jax.tree.map(lambda x, y: y if x is None else x, floats, fixed, is_leaf=_is_none)
    return linear({"kernel": head["kernel"]}, hidden, dtype)


def _chunk_gradients(
    floats: Head,
    fixed: Head,
    part: tuple[Array, Array, Array],
    cap: float | None,
    label_smoothing: float,
) -> tuple[Losses, Float[Array, "*batch"], Head, Float[Array, "*batch dim"]]:
    """Computes the losses of a chunk, and the gradients with respect to the head and `hidden`.

    Returns:
        (sums of the losses, loss of each token, gradients of the head and of `hidden`).
    """
    hidden, targets, weights = part
    products = _multiply(floats, fixed, hidden, jnp.float32)
    gradient = jax.value_and_grad(_chunk_loss, argnums=(0, 1), has_aux=True)
    (loss, (losses, plain)), (d_products, d_bias) = gradient(
        products, floats.get("bias"), targets, weights, cap, label_smoothing
    )
    # `products` and its gradient are float32, and matrix products with a float32 gradient would be
    # slow. The gradients are therefore derived from the same matrix product in the dtype of
    # `hidden`. XLA does not compute this second product, because only its gradients are used.
    multiply = partial(_multiply, dtype=hidden.dtype)
    _, pull_back = jax.vjp(lambda x, y: multiply(x, fixed, y), floats, hidden)
    d_head, d_hidden = pull_back(d_products.astype(hidden.dtype))
    d_head = d_head if d_bias is None else d_head | {"bias": d_bias}
    return Losses(loss, plain), losses, d_head, d_hidden


def _zeros_to_add_to(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns zeros like x in float32, or in float64 if x is float64."""
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _is_none(x: object) -> bool:
    return x is None


def _floats_and_others(tree: Head) -> Iterator[Any]:
    """Splits a tree into a tree of its float leaves and a tree of its other leaves.

    Only floats have gradients. Each tree has None in place of the leaves of the other tree.
    """
    is_float = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree)
    return (
        jax.tree.map(lambda x, wanted, side=side: x if wanted == side else None, tree, is_float)
        for side in (True, False)
    )


def _summed_losses(
    label_smoothing: float,
    head: Head,
    hidden: Float[Array, "chunks *batch size dim"],
    targets: Integer[Array, "chunks *batch size"],
    weights: Float[Array, "chunks *batch size"],
    cap: float | None,
) -> Losses:
    floats, fixed = _floats_and_others(head)

    def step(total: Losses, part: tuple[Array, Array, Array]) -> tuple[Losses, None]:
        hidden, targets, weights = part
        products = _multiply(floats, fixed, hidden, jnp.float32)
        bias = floats.get("bias")
        loss, (_, plain) = _chunk_loss(products, bias, targets, weights, cap, label_smoothing)
        return Losses(total.loss + loss, total.unsmoothed + jax.lax.stop_gradient(plain)), None

    zero, _ = vary_alike(Losses(jnp.float32(0), jnp.float32(0)), hidden)
    return jax.lax.scan(step, zero, (hidden, targets, weights))[0]


def _summed_losses_forward(
    label_smoothing: float,
    head: Head,
    hidden: Float[Array, "chunks *batch size dim"],
    targets: Integer[Array, "chunks *batch size"],
    weights: Float[Array, "chunks *batch size"],
    cap: float | None,
) -> tuple[Losses, tuple[Any, ...]]:
    floats, fixed = _floats_and_others(head)

    def step(
        carry: tuple[Losses, Any], part: tuple[Array, Array, Array]
    ) -> tuple[tuple[Losses, Any], tuple[Array, Array]]:
        found, losses, d_head, d_hidden = _chunk_gradients(
            floats, fixed, part, cap, label_smoothing
        )
        # The derivative of the sum with respect to a token's weight is the token's loss.
        d_weights = jnp.where(part[2] != 0, losses, 0.0)
        return jax.tree.map(jnp.add, carry, (found, d_head)), (d_hidden, d_weights)

    zeros = Losses(jnp.float32(0), jnp.float32(0)), jax.tree.map(_zeros_to_add_to, floats)
    start, _ = vary_alike(zeros, hidden)
    (total, d_head), by_token = jax.lax.scan(step, start, (hidden, targets, weights))
    d_head = jax.tree.map(lambda d, x: d.astype(x.dtype), d_head, floats)
    return total, (d_head, *by_token)


def _summed_losses_backward(gradients: tuple[Any, ...], cotangent: Losses) -> tuple[Any, ...]:
    gradients = jax.tree.map(lambda g: (g * cotangent.loss).astype(g.dtype), gradients)
    d_head, d_hidden, d_weights = gradients
    return d_head, d_hidden, None, d_weights, None
