"""The tokens of a forward pass, and the keys that they attend to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.masks import DenseMask, Mask, Padding
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.cache.table import TableView
from jaxformer.functional.hooks import HookPoints, Hooks
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.positions import DocumentCursor, continued_segment_ids, document_positions
from jaxformer.functional.symbolic import Size, at_most

# For at most this many queries, attention to cached keys can compute all scores at once.
FEW_QUERIES = 64


def choose_implementation(run: Run, name: str = "attention") -> str:
    """Returns the attention implementation of a sub-layer.

    It is "explicit" if the scores or weights of the sub-layer are captured or patched.
    """
    points = {f"{name}.scores", f"{name}.weights"}
    if points & {*run.hooks.capture, *run.hooks.patch}:
        return "explicit"
    chosen = run.execution.attention
    return "blockwise" if chosen == "auto" and not run.placement.fused_kernels else chosen


def is_few(num_queries: Size) -> bool:
    """Returns whether there are at most `FEW_QUERIES` queries, as in a decoding step."""
    return at_most(num_queries, FEW_QUERIES)


def is_step(run: Run, num_queries: Size, name: str = "attention") -> bool:
    """Returns whether attention to cached keys computes the scores of all queries at once."""
    chosen = choose_implementation(run, name) == "explicit" or run.execution.attention == "auto"
    return chosen and is_few(num_queries)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a forward pass, with the cached tokens and sources that they attend to.

    Attributes:
        new: positions and documents of the new tokens.
        run: execution options, dropout key and hooks of the forward pass.
        cache_views: {window size, or None for all tokens: the `TableView` of the forward pass for
            layers with this window}. If `cache_views` is None, there is no cache, and the tokens
            are complete sequences. The cached keys and values are in the states of the layers.
        source: length and padding of the sources; None for a model without a source.
        encoded: the encoder's output for the sources; None if the cache holds their keys and
            values.
        contexts: the result of `SubLayer.context` for each sub-layer; see `sublayer.with_contexts`.
    """

    new: TokenInfo
    run: Run
    cache_views: Mapping[int | None, TableView] | None = None
    source: TokenInfo | None = None
    encoded: Forward | None = None
    contexts: Mapping[Any, Any] = field(default_factory=dict)

    @classmethod
    def from_sequences(cls, inputs: Inputs, run: Run, encoded: Forward | None = None) -> "Tokens":
        """Returns the tokens of complete sequences; `encoded` is the encoder's output."""
        length, source = inputs.tokens.shape[1], None
        positions, documents = jnp.arange(length, dtype=jnp.int32), None
        if inputs.segment_ids is not None:
            begin = DocumentCursor.begin(inputs.segment_ids.shape[0])
            documents, positions, _ = document_positions(inputs.segment_ids, begin)
        if encoded is not None:
            source = TokenInfo(encoded.hidden.shape[1], None, inputs.source_segment_ids)
        return cls(TokenInfo(length, positions, documents), run, None, source, encoded)

    @classmethod
    def from_cache(cls, inputs: Inputs, cache: Cache, run: Run) -> tuple["Tokens", Cache]:
        """Reserves cache slots for the tokens; returns the tokens and the updated cache."""
        segment_ids = continued_segment_ids(
            inputs.segment_ids, cache.cursor, inputs.tokens.shape[:2]
        )
        cache, new, views = cache.append(segment_ids)
        return cls(new, run, views, cache.source), cache

    def hook(self, hooks: Hooks) -> HookPoints:
        """Returns the hook points of a forward pass over these tokens."""
        return HookPoints(hooks, self.new.positions, self.new.segment_ids, self.run.placement)

    def self_attention(self, mask: Mask, scores: Scores) -> Context:
        """Returns the `Context` of self-attention, whose keys may be in a cache."""
        run = self.run
        if self.cache_views is None:
            return self._within_sequence(mask, scores)
        view = self.cache_views[mask.reach if mask.reach in self.cache_views else None]
        keys, reads = view.tokens, "slots"
        if view.earlier is not None:
            keys, reads = view.earlier.followed_by(self.new), "slots before, and new tokens"
        is_one_step = is_step(run, self.new.length)
        if is_one_step:
            # The bias and the mask are evaluated here, once for all layers that share them.
            scores, mask = scores.evaluated(self.new, keys), DenseMask(mask(self.new, keys))
        # The implementation "explicit" always reads all slots of the cache, because the captured
        # attention weights have one key per slot.
        elif run.is_first and choose_implementation(run) != "explicit":
            context = self._within_sequence(mask, scores)
            return replace(context, written=view.written, reads="new tokens")
        return Context(
            mask,
            self.new,
            keys,
            scores,
            "step" if is_one_step else choose_implementation(run),
            written=view.written,
            reads=reads,
            positions=self.new.positions,
            placement=run.placement,
        )

    def _within_sequence(self, mask: Mask, scores: Scores) -> Context:
        """Returns the `Context` of tokens that attend only to each other."""
        # Tokens of a document are in order, so a causal mask can use the index in the sequence,
        # which is static. Windows, prefixes and biases need positions, which depend on data if
        # documents are packed.
        tokens = self.new
        needs_positions = mask.needs_positions or scores.bias is not None
        info = tokens
        if tokens.segment_ids is None or not needs_positions:
            info = replace(tokens, positions=None)
        return Context(
            mask,
            info,
            info,
            scores,
            choose_implementation(self.run),
            positions=tokens.positions,
            in_order=True,
            placement=self.run.placement,
        )

    def source_attention(self, scores: Scores) -> Context:
        """Returns the `Context` of attention to all tokens of a source except padding.

        Raises:
            ValueError: `source` is None.
        """
        if self.source is None:
            raise ValueError("source is None, but cross-attention needs a source")
        name, run, num_queries = "cross_attention", self.run, self.new.length
        # The implementation "step" does not mask NaN at padding, so it is used only for cached keys
        # and values, which are zero at padding.
        is_one_step = self.encoded is None and is_step(run, num_queries, name)
        return Context(
            Padding(),
            TokenInfo(num_queries),
            self.source,
            scores,
            "step" if is_one_step else choose_implementation(run, name),
            name=name,
            placement=run.placement,
        )
