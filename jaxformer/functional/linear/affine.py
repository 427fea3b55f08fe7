"""The linear layer y = x W + b and its initializer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from jaxformer.functional.linear.kernels import (
    Int8Table,
    is_kernel,
    product,
    quantize,
    quantize_table,
)
from jaxformer.functional.linear.low_rank import concatenate_kernels
from jaxformer.functional.trees import Weights

Scalar = float | Float[Array, ""]


def init_linear(
    key: PRNGKeyArray, in_dim: int, out_dim: int, *, use_bias: bool = True, stddev: Scalar = 0.02
) -> dict[str, Float[Array, "..."]]:
    """Returns W ~ N(0, stddev²) [in_dim, out_dim] and b = 0 [out_dim].

    With the default `stddev` this is GPT-2's initialization (Radford et al. 2019).
    """
    weights = {"kernel": stddev * jax.random.normal(key, (in_dim, out_dim), jnp.float32)}
    if use_bias:
        weights["bias"] = jnp.zeros(out_dim, jnp.float32)
    return weights


def linear(
    weights: Weights, x: Float[Array, "*batch in_dim"], dtype: DTypeLike | None = None
) -> Float[Array, "*batch out_dim"]:
    """Computes y = x W + b with operands in the dtype of x.

    Leading axes are folded into one axis, so that the gradient of W is one matrix product.

    Args:
        weights: {"kernel": W} with an optional "bias". W is an array or a `Kernel`.
        x: the input.
        dtype: the dtype of y; defaults to the dtype of x.
    """
    y = product(x.reshape(-1, x.shape[-1]), weights["kernel"], dtype)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    if "bias" not in weights:
        return y
    # The bias is broadcast before the conversion, so that its gradient is summed in float32.
    return y + jnp.broadcast_to(weights["bias"], y.shape).astype(y.dtype)


def soft_cap(y: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Computes cap · tanh(y / cap), which is close to y for small y; returns y if cap is None."""
    return y if cap is None else cap * jnp.tanh(y / cap)


def fuse_linear(maps: Sequence[Mapping]) -> dict | None:
    """Fuses linear layers with the same input into the layer x → [x W₁ + b₁, x W₂ + b₂, …].

    Returns None if the kernels cannot be concatenated, or if only some layers have a bias.
    """
    kernel = concatenate_kernels([weights["kernel"] for weights in maps])
    biases = [weights["bias"] for weights in maps if "bias" in weights]
    if kernel is None or len(biases) not in (0, len(maps)):
        return None
    return {"kernel": kernel} | ({"bias": jnp.concatenate(biases, axis=-1)} if biases else {})


def target_kernels(function: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces the kernel of every linear layer in a tree of weights by function(kernel)."""

    def at(path: tuple[Any, ...], x: Any) -> Any:
        return function(x) if getattr(path[-1], "key", None) == "kernel" else x

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=is_kernel)


def quantize_all(params: Weights) -> Weights:
    """Converts every matrix and the table of token vectors to 8-bit integers.

    LoRA updates are added to their kernels before the conversion. Norms, biases and positions are
    unchanged. `apply`, `generate` and all other functions that take parameters accept the result.
    A loss can be differentiated with respect to every array of the result except the integers.
    """
    params = dense_all(params)

    def at(path: tuple[Any, ...], x: Any) -> Any:
        keys = [getattr(key, "key", None) for key in path]
        return quantize_table(x) if keys[-2:] == ["embedding", "tokens"] else x

    quantized = target_kernels(quantize, params)
    return jax.tree_util.tree_map_with_path(at, quantized, is_leaf=is_kernel)


def dense_all(params: Weights) -> Weights:
    """Replaces each `Kernel` and `Int8Table` in a tree by the array that it represents."""

    def is_other(x: Any) -> bool:
        return is_kernel(x) or isinstance(x, Int8Table)

    return jax.tree.map(lambda x: x.dense() if is_other(x) else x, params, is_leaf=is_other)
