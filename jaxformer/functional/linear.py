"""The affine map, y = x W + b, and the initialiser that GPT-2 gave it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.kernels import (
    concatenated,
    is_kernel,
    product,
    quantize,
    quantize_table,
)


def init_linear(key, in_dim: int, out_dim: int, *, use_bias: bool = True, stddev: float = 0.02):
    """W ~ N(0, stddev²) [in_dim, out_dim] and b = 0 [out_dim] (GPT-2, Radford et al. 2019)."""
    weights = {"kernel": stddev * jax.random.normal(key, (in_dim, out_dim))}
    if use_bias:
        weights["bias"] = jnp.zeros(out_dim)
    return weights


def linear(weights, x: Float[Array, "*batch in_dim"], dtype=None) -> Float[Array, "*batch out_dim"]:
    """y = x W + b, from operands in the dtype of x, in `dtype` (None: that of x).

    weights: {"kernel": W, an array or another kernel of `kernels`, and "bias" if there is one}. The
    leading axes are folded into one: the gradient of W is then one plain matrix product.
    """
    y = product(x.reshape(-1, x.shape[-1]), weights["kernel"], dtype)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y + weights["bias"].astype(y.dtype) if "bias" in weights else y


def capped(y, cap: float | None):
    """cap · tanh(y / cap), which is within ±cap and about y where that is small; None: y."""
    return y if cap is None else cap * jnp.tanh(y / cap)


def side_by_side(maps) -> list:
    """Affine maps of one x as few of them as can be: one, [x W₁ + b₁, x W₂ + b₂, …], that reads x
    once, where their kernels allow it."""
    kernel = concatenated([weights["kernel"] for weights in maps])
    biases = [weights["bias"] for weights in maps if "bias" in weights]
    if kernel is None or len(biases) not in (0, len(maps)):
        return maps
    return [{"kernel": kernel} | ({"bias": jnp.concatenate(biases, axis=-1)} if biases else {})]


def each_kernel(function, tree):
    """The tree of weights with function(kernel) for the kernel of every affine map; biases, norms
    and tables stay as they are."""

    def at(path, x):
        return function(x) if getattr(path[-1], "key", None) == "kernel" else x

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=is_kernel)


def quantize_all(params):
    """The parameters with every matrix and the table of token vectors as 8-bit integers.

    Norms, biases and positions stay as they are. What runs on parameters runs on these: `apply`,
    `generate` and the rest, and a gradient of everything but the integers.
    """

    def at(path, x):
        keys = [getattr(key, "key", None) for key in path]
        return quantize_table(x) if keys[-2:] == ["embedding", "tokens"] else x

    quantized = each_kernel(quantize, params)
    return jax.tree_util.tree_map_with_path(at, quantized, is_leaf=is_kernel)
