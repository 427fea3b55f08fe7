"""The tokens of a pass, and what they attend to: each other, the slots of a cache, or a source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.masks import DenseMask, Mask, Padding
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.cache.table import SlotView
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.functional.symbolic import Size, at_most
from jaxformer.functional.taps import Hooks, Tap

FEW_QUERIES = 64  # the most new tokens whose scores over a cache are computed all at once


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


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass, and the earlier ones and the sources that its layers can read.

    Attributes:
        new: the tokens of the pass.
        run: how the pass runs.
        slots: for the layers of each reach, which tokens the slots of the cache hold and where the
            new ones go; keys and values are in the layers' states. None: the tokens are complete
            sequences.
        source: length and padding of the sources; None: the model reads none.
        encoded: the encoder's result for the sources; None: the cache has read them.
        contexts: what all layers with a sub-layer share in the pass; see `sublayer.with_contexts`.
    """

    new: TokenInfo
    run: Run
    slots: Mapping[int | None, SlotView] | None = None
    source: TokenInfo | None = None
    encoded: Forward | None = None
    contexts: Mapping[Any, Any] = field(default_factory=dict)

    @classmethod
    def of_sequences(cls, inputs: Inputs, run: Run, encoded: Forward | None = None) -> "Tokens":
        """Returns the pass over complete sequences; `encoded` is the result for their sources."""
        length, source = inputs.tokens.shape[1], None
        positions, documents = jnp.arange(length, dtype=jnp.int32), None
        if inputs.segments is not None:
            begin = DocumentCursor.begin(inputs.segments.shape[0])
            documents, positions, _ = document_positions(inputs.segments, begin)
        if encoded is not None:
            source = TokenInfo(encoded.hidden.shape[1], None, inputs.source_segments)
        return cls(TokenInfo(length, positions, documents), run, None, source, encoded)

    @classmethod
    def of_cache(cls, inputs: Inputs, cache: Cache, run: Run) -> tuple["Tokens", Cache]:
        """Returns (the pass over tokens that continue a cache, the cache with their slots)."""
        segments = continued_segments(inputs.segments, cache.cursor, inputs.tokens.shape[:2])
        cache, new, slots = cache.append(segments)
        return cls(new, run, slots, cache.source), cache

    def tap(self, hooks: Hooks) -> Tap:
        """Returns the tap of the tokens for some points."""
        return Tap(hooks, self.new.positions, self.new.segments, self.run.placement)

    def self_attention(self, mask: Mask, scores: Scores) -> Context:
        """Returns what the tokens attend to: each other and, with a cache, its slots."""
        run = self.run
        if self.slots is None:
            return self._without_slots(mask, scores)
        view = self.slots[mask.reach if mask.reach in self.slots else None]
        keys, reads = view.slots, "slots"
        if view.earlier is not None:
            keys, reads = view.earlier.followed_by(self.new), "slots before, and new tokens"
        at_once = is_step(run, self.new.length)
        if at_once:  # all layers share the bias and the mask
            scores, mask = scores.evaluated(self.new, keys), DenseMask(mask(self.new, keys))
        # Captured weights need the axis of slots, so explicit attention always reads them.
        elif run.is_first and implementation_of(run) != "explicit":
            context = self._without_slots(mask, scores)
            return replace(context, written=view.written, reads="new tokens")
        return Context(
            mask,
            self.new,
            keys,
            scores,
            "step" if at_once else implementation_of(run),
            written=view.written,
            reads=reads,
            positions=self.new.positions,
            placement=run.placement,
        )

    def _without_slots(self, mask: Mask, scores: Scores) -> Context:
        """Returns the context of tokens that attend to each other only, along a row."""
        # The order along a row is the order within each document, so a causal mask needs no
        # positions. Windows, prefixes and biases need them. With documents, they are known only
        # where the program runs.
        tokens = self.new
        needs_them = mask.needs_positions or scores.bias is not None
        info = tokens
        if tokens.segments is None or not needs_them:
            info = replace(tokens, positions=None)
        return Context(
            mask,
            info,
            info,
            scores,
            implementation_of(self.run),
            positions=tokens.positions,
            in_order=True,
            placement=self.run.placement,
        )

    def source_attention(self, scores: Scores) -> Context:
        """Returns the context of tokens that attend to a whole source, except to its padding.

        Raises:
            ValueError: there is no source.
        """
        if self.source is None:
            raise ValueError("source is None; cross-attention reads one")
        point, run, num_queries = "cross_attention.weights", self.run, self.new.length
        # A cache has zeros as keys and values of padding.
        at_once = self.encoded is None and is_step(run, num_queries, point)
        return Context(
            Padding(),
            TokenInfo(num_queries),
            self.source,
            scores,
            "step" if at_once else implementation_of(run, point),
            point=point,
            placement=run.placement,
        )
