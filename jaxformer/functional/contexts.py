"""What a query attends to: its row, a cache, or a source.

Each is a small value that a block calls: context(query, key, value, state, tap) → (output, state),
where the state is what one layer keeps for later tokens. What is the same in all layers is in the
value; the state runs beside the layers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.attention import dot_product_attention, few_queries_attention
from jaxformer.functional.masks import Mask, Padding, TokenInfo
from jaxformer.functional.scores import Scores
from jaxformer.functional.slots import by_head, write_slots
from jaxformer.functional.taps import no_tap


@dataclass(frozen=True)
class RowAttention:
    """The tokens of a row attend to that row; nothing is kept."""

    mask: Mask
    tokens: TokenInfo
    scores: Scores
    implementation: str

    def __call__(self, query, key, value, state=None, tap=no_tap):
        output = dot_product_attention(
            query,
            key,
            value,
            self.mask,
            query_info=self.tokens,
            key_info=self.tokens,
            scores=self.scores,
            implementation=self.implementation,
            tap=tap,
        )
        return output, None


@dataclass(frozen=True)
class CacheAttention:
    """New tokens attend to the slots of a cache, into which their own keys and values go first.

    new, slots: the tokens, and what the slots hold once they are written; written: the slot of the
    first new token, int [] (or of each, int [batch, new]); visible: bool [batch, new, slots] where
    all scores are taken at once, or None: they are not.
    """

    mask: Mask
    new: TokenInfo
    slots: TokenInfo
    written: Int[Array, "*tokens"]
    visible: Bool[Array, "batch new slots"] | None
    scores: Scores
    implementation: str

    def __call__(self, query, key, value, state, tap=no_tap):
        keys, values = state
        keys = write_slots(keys, key, self.written)
        values = write_slots(values, value, self.written)
        if self.visible is not None:
            output = few_queries_attention(query, keys, values, self.visible, self.scores, tap=tap)
            return output, (keys, values)
        output = dot_product_attention(
            query,
            by_head(keys, len(query)),
            by_head(values, len(query)),
            self.mask,
            query_info=self.new,
            key_info=self.slots,
            scores=self.scores,
            implementation=self.implementation,
            tap=tap,
        )
        return output, (keys, values)


class Source(NamedTuple):
    """What a model reads first. tokens: int [sources, source length] or embeddings in their place;
    segments: 0 for padding; None: there is none."""

    tokens: Array
    segments: Int[Array, "sources source_length"] | None = None


@dataclass(frozen=True)
class SourceAttention:
    """Queries attend to a source, all of it but its padding.

    encoded: what an encoder made of it [sources, source length, dim], from which each layer makes
    its keys and values; None where a cache holds them. segments: 0 for padding; None: there is
    none. Each source serves as many rows in turn as come to its share. few_queries: all scores are
    taken at once, as for a step of decoding.
    """

    encoded: Float[Array, "sources source_length dim"] | None
    segments: Int[Array, "sources source_length"] | None
    scores: Scores
    implementation: str
    few_queries: bool = False

    def __call__(self, query, key, value, tap=no_tap):
        sources, length, segments = len(key), key.shape[-2], self.segments
        if self.few_queries:
            if segments is None:
                segments = jnp.ones((sources, length), jnp.int32)
            visible = (segments != 0)[:, None]
            return few_queries_attention(query, key, value, visible, self.scores, tap=tap)
        served = len(query) // sources
        if served > 1:
            each = (key, value, segments)
            key, value, segments = jax.tree.map(lambda x: jnp.repeat(x, served, axis=0), each)
        return dot_product_attention(
            query,
            key,
            value,
            Padding(),
            key_info=TokenInfo(length, None, segments),
            scores=self.scores,
            implementation=self.implementation,
            tap=tap,
        )
