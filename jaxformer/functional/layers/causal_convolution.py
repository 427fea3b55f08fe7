"""Causal depthwise convolution: each feature over the tokens of a document.

    y_t = Σ_j w_j ⊙ x_{t−j} + b,    j = 0 … K − 1

x_{t−j} is the input j tokens earlier in the same document, or 0 if the document begins later than
that. Padding takes no position.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.trees import Weights


def init_causal_convolution(
    key: PRNGKeyArray, kernel_size: int, dim: int, *, use_bias: bool, stddev: float
) -> dict[str, Float[Array, "..."]]:
    """Returns w ~ N(0, stddev²) [kernel_size, dim], whose last row is w_0, and b = 0 [dim]."""
    weights = {"filter": stddev * jax.random.normal(key, (kernel_size, dim), jnp.float32)}
    return weights | ({"bias": jnp.zeros(dim, jnp.float32)} if use_bias else {})


def causal_convolution(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    order: TokenOrder,
    past: Float[Array, "batch earlier dim"] | None = None,
    *,
    keeps_states: bool = False,
) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch *length earlier dim"] | None]:
    """Computes the convolution of the module, in float32.

    Args:
        weights: filter [kernel_size, dim], whose last row is w_0, and optionally bias.
        x: the inputs.
        order: the order of the tokens.
        past: the last kernel_size − 1 inputs before x, the newest last. Those of an earlier
            document are not read. None: all documents begin in x.
        keeps_states: whether to return the last inputs after each token.

    Returns:
        The outputs, in the dtype of x and 0 at padding, and the last kernel_size − 1 inputs.
    """
    rows = weights["filter"].astype(jnp.float32)
    earlier, length = len(rows) - 1, x.shape[1]
    x = order.compact(x)
    before = jnp.zeros_like(x, shape=(x.shape[0], earlier, x.shape[2])) if past is None else past
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for distance in range(len(rows)):
        begin = earlier - distance
        read = jax.lax.slice_in_dim(inputs, begin, begin + length, axis=1).astype(jnp.float32)
        in_document = (order.positions >= distance)[..., None]
        y += jnp.where(in_document, read, 0) * rows[begin]
    y = y + weights["bias"] if "bias" in weights else y
    if order.documents is not None:
        y = jnp.where((order.documents != 0)[..., None], y, 0)
    newest = None
    if past is not None:
        newest = order.newest(inputs, earlier, after_each=keeps_states).astype(past.dtype)
    return order.restore(y.astype(x.dtype)), newest


def init_past(
    batch_size: int, kernel_size: int, dim: int, dtype: DTypeLike
) -> Float[Array, "batch earlier dim"]:
    """Returns the inputs before the first token, which no token reads."""
    return jnp.zeros((batch_size, kernel_size - 1, dim), dtype)
