"""The affine map, y = x W + b, and the initialiser that GPT-2 gave it."""

import os
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def init_linear(key, in_dim: int, out_dim: int, *, use_bias: bool = True, stddev: float = 0.02):
    """W ~ N(0, stddev²) [in_dim, out_dim] and b = 0 [out_dim] (GPT-2, Radford et al. 2019)."""
    weights = {"kernel": stddev * jax.random.normal(key, (in_dim, out_dim))}
    if use_bias:
        weights["bias"] = jnp.zeros(out_dim)
    return weights


def linear(weights, x: Float[Array, "*batch in_dim"], dtype=None) -> Float[Array, "*batch out_dim"]:
    """y = x W + b, from operands in the dtype of x, in `dtype` (None: that of x).

    weights are those of `init_linear`, or what `by_rows` makes of them. The leading axes are folded
    into one: the gradient of W is then one plain matrix product.
    """
    dtype, flat = dtype or x.dtype, x.reshape(-1, x.shape[-1])
    if "rows" in weights:
        y = _rows_times(weights["rows"], flat, dtype)
    else:
        y = jnp.matmul(flat, weights["kernel"].astype(x.dtype), preferred_element_type=dtype)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y + weights["bias"].astype(dtype) if "bias" in weights else y


def join(*maps):
    """Several affine maps of one x as one: [x W₁ + b₁, x W₂ + b₂, …]."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *maps)


_MANY = 384  # inputs from which `by_rows` is faster on two cores: at 128 it is not, at 512 it is
_FEW_ROWS = 64  # rows of x up to which a product with such weights goes part by part


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Wᵀ cut into equal parts, [parts, rows, in_dim], with rows of zeros after the out_dim-th."""

    array: Array
    out_dim: int = field(metadata={"static": True})


def by_rows(weights, dtype):
    """The same map laid out for small steps, which read every weight for a few tokens, in `dtype`.

    The weights of one output lie together, and there is a part for each core: XLA:CPU computes a
    product with few columns on one thread, but a batch of them side by side. A step of GPT-2 124M
    at batch 8 took 38 ms so and 77 ms as x W (two cores, one run, medians).
    """
    kernel = weights["kernel"].astype(dtype)
    in_dim, out_dim = kernel.shape
    parts = min(os.cpu_count() or 1, 8) if jax.default_backend() == "cpu" else 1
    rows = jnp.pad(kernel.T, ((0, -out_dim % parts), (0, 0))).reshape(parts, -1, in_dim)
    return {"rows": Rows(rows, out_dim)} | {k: v for k, v in weights.items() if k == "bias"}


def all_by_rows(tree, dtype):
    """`by_rows` of every affine map in a tree of weights; scales and lone biases stay float32.

    A map of few inputs stays as it is: its output, which must be transposed, is as much work.
    """
    if "kernel" in tree:
        return by_rows(tree, dtype) if len(tree["kernel"]) >= _MANY else _in(tree, dtype)
    return {
        name: all_by_rows(part, dtype) if isinstance(part, dict) else part
        for name, part in tree.items()
    }


def _in(weights, dtype):
    return {**weights, "kernel": weights["kernel"].astype(dtype)}


def _rows_times(rows: Rows, x, dtype):
    """x W for x [rows, in_dim]: part by part for a few rows, else one plain product.

    A plain product keeps every core busy with many rows, and must be what they get: XLA:CPU of
    jaxlib 0.10.2 compiles norm → broadcast over the parts → batched product of 4,096 rows or more
    into a wrong program (docs/hazards.md).
    """
    if len(x) > _FEW_ROWS:
        kernel = rows.array.reshape(-1, x.shape[-1])[: rows.out_dim]
        return jnp.einsum("bi,oi->bo", x, kernel, preferred_element_type=dtype)
    parts = jnp.broadcast_to(x, (len(rows.array), *x.shape))
    y = jnp.einsum("poi,pbi->pob", rows.array, parts, preferred_element_type=dtype)
    return y.reshape(-1, len(x))[: rows.out_dim].T
