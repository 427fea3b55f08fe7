"""Attention by cuDNN's fused kernel for GPUs, which takes numbers of tokens instead of masks.

- Padding at the end of rows becomes a number of keys for each row.
- Packed documents become offsets and lengths, on Hopper GPUs and newer (`private_cudnn`).

Rows that are packed or padded in another way are known only at run time. Blockwise attention
computes them.

Reference:
    jax.nn.dot_product_attention; jax._src.cudnn.fused_attention_stablehlo.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.fused_kernels import (
    blockwise_if,
    unsupported_arrays,
    unsupported_scores,
)
from jaxformer.functional.attention.key_ranges import (
    RUN_TIME,
    has_other_positions,
    is_packed,
    only_rise,
)
from jaxformer.functional.attention.masks import Causal, Mask, Window
from jaxformer.functional.attention.private_cudnn import cudnn_attention

DTYPES = (jnp.bfloat16, jnp.float16)
# The kernel stores a float32 per query, head and document: room for more documents costs memory.
_MOST_DOCUMENTS, _TOKENS_PER_DOCUMENT = 32, 64


@dataclass(frozen=True)
class CuDNN:
    """cuDNN's kernel, a `FusedKernel`.

    Attributes:
        is_hopper: whether the GPUs are of the Hopper generation (compute capability 9.0) or newer.
    """

    is_hopper: bool = False
    name: str = "cuDNN"

    def unsupported_reason(
        self,
        query: Float[Array, "*batch heads queries d"],
        key: Float[Array, "*batch kv_heads keys d"],
        value: Float[Array, "*batch kv_heads keys v"],
        context: Context,
    ) -> str | None:
        """See `FusedKernel`."""
        reason = unsupported_arrays(query, key, value, DTYPES)
        reason = reason or unsupported_scores(context.scores)
        return reason or self._unsupported_heads(query, key, value) or self._unsupported(context)

    def _unsupported_heads(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
    ) -> str | None:
        most, head_dim = 256 if self.is_hopper else 128, query.shape[-1]
        if head_dim % 8 or head_dim > most:
            return f"it needs a head_dim that is a multiple of 8 and at most {most}, not {head_dim}"
        if key.shape != value.shape:
            return "it needs keys and values of equal shapes"
        return None

    def _unsupported(self, context: Context) -> str | None:
        rules, segments = context.mask.rules(), context.keys.segments
        if context.scores.cap is not None:
            return "it does not support a cap of the scores"
        if context.scores.bias is not None:
            return "it does not support a bias of the scores"
        if has_other_positions(context):
            return "it does not support cached or other positions"
        if not all(type(rule) in (Causal, Window, *RUN_TIME) for rule in rules):
            return f"it does not support the mask {context.mask}"
        if any(type(rule) is Window for rule in rules):
            if not is_causal(context.mask):
                return "it supports a sliding window only together with the causal mask"
            if segments is not None:
                return "it does not support a sliding window together with padding or documents"
        queries, keys = context.queries.length, context.keys.length
        if queries != keys and (is_causal(context.mask) or is_packed(context)):
            return f"it needs equal numbers, not {queries} queries and {keys} keys"
        if is_packed(context) and not self.is_hopper:
            return "it supports packed documents only on Hopper GPUs and newer"
        return None

    def attention(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
        context: Context,
    ) -> Float[Array, "batch heads queries v"]:
        """See `FusedKernel`."""
        windows = [rule.size for rule in context.mask.rules() if type(rule) is Window]
        rule = Rule(context.scores.factor, is_causal(context.mask), min(windows, default=None))
        per_device, segments = context.placement.per_device, context.keys.segments
        if segments is None:
            return per_device(partial(rows_attention, rule), query, key, value)
        segments = jnp.broadcast_to(segments, (len(query), segments.shape[-1]))
        if is_packed(context):
            same = (context.queries.segments == context.keys.segments).all()
            function, unsupported = documents_attention, ~(same & documents_fit(segments))
        else:
            function, unsupported = rows_attention, ~is_padded_at_the_end(segments)

        def fused(query: Array, key: Array, value: Array) -> Array:
            return per_device(partial(function, rule), query, key, value, segments)

        return blockwise_if(unsupported, fused, (query, key, value), context)


class Rule(NamedTuple):
    """What is the same for all rows.

    Attributes:
        scale: factor of the products.
        is_causal: whether a query sees no later keys.
        window: how many tokens a query sees, itself included; None: all.
    """

    scale: float
    is_causal: bool
    window: int | None = None


def is_causal(mask: Mask) -> bool:
    """Returns whether a query sees no later keys."""
    return any(type(rule) is Causal for rule in mask.rules())


def rows_attention(
    rule: Rule,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    segments: Int[Array, "batch keys"] | None = None,
) -> Float[Array, "batch heads queries v"]:
    """Calls the kernel for rows of one document; segments are 0 for padding at the end."""
    lengths = None
    if segments is not None:
        # The output of a query without keys is undefined: a row of padding keeps one key of zeros.
        lengths = jnp.maximum((segments != 0).sum(axis=-1, dtype=jnp.int32), 1)
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),  # [batch, length, heads, head_dim]
        scale=rule.scale,
        is_causal=rule.is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation="cudnn",
    )
    return output.swapaxes(1, 2)


def is_padded_at_the_end(segments: Int[Array, "batch keys"]) -> Bool[Array, ""]:
    """Returns whether no token stands behind padding."""
    real = segments != 0
    return (real[:, 1:] <= real[:, :-1]).all()


def most_documents(length: int) -> int:
    """Returns how many documents of a row the kernel computes; with one it would ignore them."""
    return max(2, min(_MOST_DOCUMENTS, length // _TOKENS_PER_DOCUMENT))


def documents_fit(documents: Int[Array, "batch length"]) -> Bool[Array, ""]:
    """Returns whether each document is contiguous and the rows have few enough of them."""
    return only_rise(documents) & (documents.max() <= most_documents(documents.shape[-1]))


def documents_attention(
    rule: Rule,
    query: Float[Array, "batch heads length d"],
    key: Float[Array, "batch kv_heads length d"],
    value: Float[Array, "batch kv_heads length v"],
    documents: Int[Array, "batch length"],
) -> Float[Array, "batch heads length v"]:
    """Calls the kernel for rows of packed documents, numbered 1, 2, … in order; 0 is padding."""
    # jax 0.10 and 0.11 compute the offsets of keys with the number of query heads (jax#39521).
    repeats = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x, repeats, axis=1) for x in (key, value))
    lengths, offsets = lengths_and_offsets(documents)
    masks = cudnn_attention.MaskType
    output = cudnn_attention.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=rule.scale,
        mask_type=masks.PADDING_CAUSAL if rule.is_causal else masks.PADDING,
    )
    # pyrefly: ignore[bad-argument-type] (a tuple only with residuals)
    output = jnp.swapaxes(output, 1, 2)
    # The kernel does not write the outputs of padding.
    return jnp.where((documents != 0)[:, None, :, None], output, 0)


def lengths_and_offsets(
    documents: Int[Array, "batch length"],
) -> tuple[Int[Array, "batch documents"], Int[Array, "batch documents+1"]]:
    """Returns the number of tokens of each document and its first token; −1 if it is absent."""
    numbers = jnp.arange(1, most_documents(documents.shape[-1]) + 1, dtype=jnp.int32)
    belongs = documents[:, None, :] == numbers[:, None]
    exists = belongs.any(axis=-1)
    lengths = jnp.where(exists, belongs.sum(axis=-1), -1).astype(jnp.int32)
    offsets = jnp.where(exists, belongs.argmax(axis=-1), -1).astype(jnp.int32)
    return lengths, jnp.pad(offsets, [(0, 0), (0, 1)], constant_values=-1)
