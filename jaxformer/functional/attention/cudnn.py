"""Attention by cuDNN's fused kernel for GPUs.

The kernel takes sequence lengths instead of masks:

- Padding at the end of a sequence is represented by the sequence's number of keys.
- Packed documents are represented by offsets and lengths, on Hopper GPUs and newer
  (`private_cudnn`).

The compiled program checks at run time whether the kernel supports the padding and packing of the
sequences, and otherwise runs blockwise attention.

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
# The kernel stores one float32 per query, head and document, so many documents would take too much
# memory.
_MOST_DOCUMENTS, _TOKENS_PER_DOCUMENT = 32, 64


@dataclass(frozen=True)
class CuDNN:
    """Fused attention kernel of cuDNN.

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
            return (
                "the kernel needs a head_dim that is a multiple of 8 and at most "
                f"{most}, not {head_dim}"
            )
        if key.shape != value.shape:
            return "the kernel needs keys and values of equal shapes"
        return None

    def _unsupported(self, context: Context) -> str | None:
        rules, segment_ids = context.mask.rules(), context.keys.segment_ids
        if context.scores.cap is not None:
            return "the kernel does not support a soft cap of the scores"
        if context.scores.bias is not None:
            return "the kernel does not support a bias of the scores"
        if has_other_positions(context):
            return "the kernel does not support cached or explicit positions"
        if not all(type(rule) in (Causal, Window, *RUN_TIME) for rule in rules):
            return f"the kernel does not support the mask {context.mask}"
        if any(type(rule) is Window for rule in rules):
            if not is_causal(context.mask):
                return "the kernel supports a sliding window only together with the causal mask"
            if segment_ids is not None:
                return (
                    "the kernel does not support a sliding window together with "
                    "padding or documents"
                )
        queries, keys = context.queries.length, context.keys.length
        if queries != keys and (is_causal(context.mask) or is_packed(context)):
            return (
                f"the kernel needs as many queries as keys, not {queries} queries and {keys} keys"
            )
        if is_packed(context) and not self.is_hopper:
            return "the kernel supports packed documents only on Hopper GPUs and newer"
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
        per_device, segment_ids = context.placement.per_device, context.keys.segment_ids
        if segment_ids is None:
            return per_device(partial(single_document_attention, rule), query, key, value)
        segment_ids = jnp.broadcast_to(segment_ids, (len(query), segment_ids.shape[-1]))
        if is_packed(context):
            same = (context.queries.segment_ids == context.keys.segment_ids).all()
            function, unsupported = documents_attention, ~(same & documents_fit(segment_ids))
        else:
            function, unsupported = single_document_attention, ~is_padded_at_the_end(segment_ids)

        def fused(query: Array, key: Array, value: Array) -> Array:
            return per_device(partial(function, rule), query, key, value, segment_ids)

        return blockwise_if(unsupported, fused, (query, key, value), context)


class Rule(NamedTuple):
    """Static arguments of the cuDNN kernel, shared by all batch elements.

    Attributes:
        scale: factor of the products q·k.
        is_causal: whether queries attend only to earlier keys and their own.
        window: how many tokens a query attends to, its own included; all if None.
    """

    scale: float
    is_causal: bool
    window: int | None = None


def is_causal(mask: Mask) -> bool:
    """Returns whether queries attend only to earlier keys and their own."""
    return any(type(rule) is Causal for rule in mask.rules())


def single_document_attention(
    rule: Rule,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    segment_ids: Int[Array, "batch keys"] | None = None,
) -> Float[Array, "batch heads queries v"]:
    """Calls the kernel for sequences of one document, with padding (segment id 0) at the end."""
    lengths = None
    if segment_ids is not None:
        # The kernel's output for a query without keys is undefined, so a sequence that is all
        # padding gets one key of zeros.
        lengths = jnp.maximum((segment_ids != 0).sum(axis=-1, dtype=jnp.int32), 1)
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),  # [batch, length, heads, head_dim]
        scale=rule.scale,
        is_causal=rule.is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation="cudnn",
    )
    return output.swapaxes(1, 2)


def is_padded_at_the_end(segment_ids: Int[Array, "batch keys"]) -> Bool[Array, ""]:
    """Returns whether all padding is at the end of the sequences."""
    real = segment_ids != 0
    return (real[:, 1:] <= real[:, :-1]).all()


def most_documents(length: int) -> int:
    """Returns the maximum number of documents per sequence that the kernel supports."""
    return max(2, min(_MOST_DOCUMENTS, length // _TOKENS_PER_DOCUMENT))


def documents_fit(documents: Int[Array, "batch length"]) -> Bool[Array, ""]:
    """Returns whether the kernel accepts the documents.

    The tokens of each document must be contiguous, and a sequence may have at most `most_documents`
    documents.
    """
    return only_rise(documents) & (documents.max() <= most_documents(documents.shape[-1]))


def documents_attention(
    rule: Rule,
    query: Float[Array, "batch heads length d"],
    key: Float[Array, "batch kv_heads length d"],
    value: Float[Array, "batch kv_heads length v"],
    documents: Int[Array, "batch length"],
) -> Float[Array, "batch heads length v"]:
    """Calls the kernel for sequences of packed documents.

    Segment ids number the documents 1, 2, … in order, with 0 for padding.
    """
    # The key heads are repeated, because jax 0.10 and 0.11 compute the offsets of keys with the
    # number of query heads instead of key heads (jax#39521).
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
    # pyrefly: ignore[bad-argument-type] (a tuple only if residuals are returned)
    output = jnp.swapaxes(output, 1, 2)
    # The kernel does not write the outputs at padding positions.
    return jnp.where((documents != 0)[:, None, :, None], output, 0)


def lengths_and_offsets(
    documents: Int[Array, "batch length"],
) -> tuple[Int[Array, "batch documents"], Int[Array, "batch documents+1"]]:
    """Returns the length and the first index of each document; −1 for absent documents."""
    numbers = jnp.arange(1, most_documents(documents.shape[-1]) + 1, dtype=jnp.int32)
    belongs = documents[:, None, :] == numbers[:, None]
    exists = belongs.any(axis=-1)
    lengths = jnp.where(exists, belongs.sum(axis=-1), -1).astype(jnp.int32)
    offsets = jnp.where(exists, belongs.argmax(axis=-1), -1).astype(jnp.int32)
    return lengths, jnp.pad(offsets, [(0, 0), (0, 1)], constant_values=-1)
