"""Attention alone: forward, and forward with gradients, by the length of the rows."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array

from jaxformer.bench.measurement import ATTENTION, DType, Measurement
from jaxformer.bench.timing import Rounds
from jaxformer.functional.attention.attend import Context, chosen_kernel
from jaxformer.functional.attention.dot_product import dot_product_attention
from jaxformer.functional.attention.masks import Causal, Mask
from jaxformer.functional.attention.platforms import fused_kernels
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.placement import OneDevice


class AttentionCase(NamedTuple):
    """Shapes of the queries, keys and values.

    Attributes:
        lengths: The lengths of the rows.
        tokens: Tokens of a batch; a batch has tokens / length rows, at least one.
        num_heads: The number of heads.
        head_dim: The width of a head.
    """

    lengths: tuple[int, ...]
    tokens: int
    num_heads: int
    head_dim: int


def implementation(query: Array, key: Array, value: Array, mask: Mask) -> str:
    """Returns the name of the implementation that attention="auto" selects for these arrays."""
    queries, keys = TokenInfo(query.shape[-2]), TokenInfo(key.shape[-2])
    context = Context(mask, queries, keys, placement=OneDevice(fused_kernels()))
    kernel = chosen_kernel(query, key, value, context)
    return "blockwise" if kernel is None else kernel.name


def causal_flops(rows: int, num_heads: int, length: int, head_dim: int) -> int:
    """Returns the operations of causal attention: scores and weighted sums of visible pairs."""
    return 4 * rows * num_heads * head_dim * (length * (length + 1) // 2)


def measure_attention(case: AttentionCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures causal attention of rows of each length.

    The gradients count twice the operations of the forward pass. Scores that the backward pass
    computes again do not count.

    Args:
        case: The shapes.
        dtype: The dtype of queries, keys and values.
        rounds: How often each program is timed.
    """
    return [x for length in case.lengths for x in _measure_length(case, length, dtype, rounds)]


def _measure_length(
    case: AttentionCase, length: int, dtype: DType, rounds: Rounds
) -> list[Measurement]:
    shape = (max(1, case.tokens // length), case.num_heads, length, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangent = (
        jax.random.normal(x, shape, dtype="float32").astype(dtype) for x in keys
    )

    def forward(query: Array, key: Array, value: Array) -> Array:
        return dot_product_attention(query, key, value, Causal())

    @jax.jit
    def both(cotangent: Array, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        output, pull_back = jax.vjp(forward, *inputs)
        return output, pull_back(cotangent)

    inputs = (query, key, value)
    note, shown = implementation(*inputs, Causal()), f"{shape[0]} × {length:,} tokens"
    programs = (partial(jax.jit(forward), *inputs), partial(both, cotangent, *inputs))
    one, two = (rounds.measure(program) for program in programs)
    # The forward pass reads q, k and v and writes o; the gradients add do, dq, dk and dv.
    flops, moved = causal_flops(*shape), 4 * query.nbytes
    return [
        Measurement(ATTENTION, f"{shown}, forward", dtype, one, flops, moved, note=note),
        Measurement(ATTENTION, f"{shown}, + backward", dtype, two, 3 * flops, 2 * moved, note=note),
    ]
