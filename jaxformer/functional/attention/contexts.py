"""The contexts of a pass: of complete sequences, of new tokens over a cache, and of a source."""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.functional.attention.attend import Context
from jaxformer.functional.attention.masks import DenseMask, Mask, Padding
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.functional.symbolic import Size, at_most

FEW_QUERIES = 64  # the most new tokens whose scores over a cache are computed all at once


class PassContexts(NamedTuple):
    """The tokens of a pass, and what those of each layer attend to.

    Attributes:
        positions: the position of each token in its document.
        documents: the document of each token, 0 for padding; None: one document.
        layers: the context of each layer.
        cache: the cache with slots marked for the tokens; None for complete sequences.
    """

    positions: Int[Array, "*batch length"]
    documents: Int[Array, "batch length"] | None
    layers: list[Context]
    cache: Cache | None = None


def implementation_of(run: Run, point: str = "attention.weights") -> str:
    """Returns the implementation of attention: explicit if its weights are captured or patched."""
    if point in run.hooks.capture or point in run.hooks.patch:
        return "explicit"
    name = run.execution.attention
    return "blockwise" if name == "auto" and not run.placement.fused_kernels else name


def is_few(num_queries: Size) -> bool:
    """Returns whether the queries are few, as in a decoding step."""
    return at_most(num_queries, FEW_QUERIES)


def is_step(run: Run, num_queries: Size, point: str = "attention.weights") -> bool:
    """Returns whether all scores over a cache are computed at once, as in a decoding step."""
    chosen = implementation_of(run, point) == "explicit" or run.execution.attention == "auto"
    return chosen and is_few(num_queries)


def sequence_contexts(
    inputs: Inputs, masks: tuple[Mask, ...], scores: Scores, run: Run
) -> PassContexts:
    """Returns the contexts of tokens that are complete sequences."""
    length = inputs.tokens.shape[1]
    positions, documents = jnp.arange(length, dtype=jnp.int32), None
    if inputs.segments is not None:
        begin = DocumentCursor.begin(inputs.segments.shape[0])
        documents, positions, _ = document_positions(inputs.segments, begin)
    contexts = {}
    for mask in dict.fromkeys(masks):
        contexts[mask] = row_context(mask, TokenInfo(length, positions, documents), scores, run)
    return PassContexts(positions, documents, [contexts[mask] for mask in masks])


def row_context(mask: Mask, tokens: TokenInfo, scores: Scores, run: Run) -> Context:
    """Returns the context of tokens that attend to each other, along a row."""
    # The order within a document is the order along the row. Only a rule that counts positions (a
    # window, a prefix) needs those in the document, which are not known while tracing.
    counts = tokens.segments is not None and (mask.needs_positions or scores.bias is not None)
    info = tokens if counts else replace(tokens, positions=None)
    return Context(
        mask,
        info,
        info,
        scores,
        implementation_of(run),
        positions=tokens.positions,
        in_order=True,
        placement=run.placement,
    )


def cache_contexts(
    inputs: Inputs, cache: Cache, masks: tuple[Mask, ...], scores: Scores, run: Run
) -> PassContexts:
    """Returns the contexts of tokens that continue a cache."""
    segments = continued_segments(inputs.segments, cache.cursor, inputs.tokens.shape[:2])
    cache, new, slots, written = cache.append(segments)
    at_once = is_step(run, new.length)
    if at_once:  # all layers share the bias
        scores = scores.evaluated(new, slots)
    contexts = {}
    # Captured weights have an axis of slots.
    if run.is_first and not at_once and implementation_of(run) != "explicit":
        for mask in dict.fromkeys(masks):
            context = row_context(mask, new, scores, run)
            contexts[mask] = replace(context, written=written, sees_slots=False)
        return PassContexts(new.positions, new.segments, [contexts[mask] for mask in masks], cache)
    for mask in dict.fromkeys(masks):
        rule = DenseMask(mask(new, slots)) if at_once else mask
        contexts[mask] = Context(
            rule,
            new,
            slots,
            scores,
            implementation_of(run),
            written=written,
            positions=new.positions,
            is_decoding_step=at_once,
            placement=run.placement,
        )
    return PassContexts(new.positions, new.segments, [contexts[mask] for mask in masks], cache)


def source_context(
    source: TokenInfo, num_queries: Size, scores: Scores, run: Run, *, is_cached: bool
) -> Context:
    """Returns the context of queries that attend to a whole source, except to its padding.

    Args:
        source: length and padding of the source.
        num_queries: number of tokens of the pass.
        scores: scale and cap.
        run: how the pass runs.
        is_cached: whether the source was read earlier, with zeros as keys and values of padding.
    """
    point = "cross_attention.weights"
    return Context(
        Padding(),
        TokenInfo(num_queries),
        source,
        scores,
        implementation_of(run, point),
        point=point,
        is_decoding_step=is_cached and is_step(run, num_queries, point),
        placement=run.placement,
    )
