"""Who may look at whom: a mask is a rule about positions, not an array.

A rule is a small frozen dataclass (hashable, so it can be static under jit) that answers two
questions. `rule(query, key)`: which of these keys may each of these queries see? And
`rule.key_range(start, stop, length)`: outside which keys can queries start … stop − 1 of a row see
nothing, so that no work need be done there? Rules are combined by `&`.

Explicit attention asks about the whole row, blockwise attention block by block, a cache about the
positions stored in its slots: one rule, one place, every path. Answers about positions that are
known while tracing are NumPy arrays and stay static.
"""

from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import numpy as np


class DynamicSlice(NamedTuple):
    """`size` tokens of a row from `start` on, where only the running program knows the start."""

    start: Any
    size: int


Part = slice | DynamicSlice  # of a row


def cut(array, part: Part, axis: int = -1):
    """That part of the last axis, or of the one before it."""
    if isinstance(part, DynamicSlice):
        return jax.lax.dynamic_slice_in_dim(array, part.start, part.size, axis)
    return array[(..., part, *[slice(None)] * (-1 - axis))]


@partial(
    jax.tree_util.register_dataclass, data_fields=["positions", "segments"], meta_fields=["length"]
)
@dataclass(frozen=True)
class TokenInfo:
    """Where the tokens of a row stand.

    positions: int [*batch, length], or None for 0, 1, 2, … along the row (known while tracing);
    segments: int [*batch, length], the document of each token, 0 for padding or an empty slot, or
    None for one document without padding; length: the number of tokens.
    """

    length: int
    positions: Any = None
    segments: Any = None

    def part(self, part: Part) -> "TokenInfo":
        """Some tokens of the row, in a line; their positions stay what they were."""
        if isinstance(part, DynamicSlice):
            in_order, length = part.start + jax.numpy.arange(part.size), part.size
        else:
            in_order, length = np.arange(part.start, part.stop), part.stop - part.start
        positions = in_order if self.positions is None else cut(self.positions, part)
        segments = None if self.segments is None else cut(self.segments, part)
        return TokenInfo(length, positions, segments)

    def with_axis(self, axis: int) -> "TokenInfo":
        """The same for arrays with one more axis there; what all rows share stays as it is."""
        positions, segments = self.positions, self.segments
        if np.ndim(positions) > 1:
            positions = jax.numpy.expand_dims(positions, axis)
        if segments is not None:
            segments = jax.numpy.expand_dims(segments, axis)
        return TokenInfo(self.length, positions, segments)

    def position_ids(self):
        return np.arange(self.length) if self.positions is None else self.positions


class Mask:
    """A rule. Subclasses are frozen dataclasses, registered by jax.tree_util.register_static, whose
    `__call__` is written with operators that NumPy and JAX arrays share, so that it can be asked
    about positions known while tracing and about those stored in a cache.

    needs_positions: whether the rule counts positions in the document; False if it asks only for
    the order of two tokens, which is their order along the row, padding or not.
    minimum_prefill: the fewest tokens of a document that must be read at once at its start, because
    they see later ones. reach: how many tokens back, itself counted, a query may see; None: all.
    """

    needs_positions = True
    minimum_prefill = 1
    reach: int | None = None

    def __call__(self, query: TokenInfo, key: TokenInfo):
        """bool [*batch, query length, key length] (or broadcastable to it): may query see key?"""
        raise TypeError(f"{type(self).__name__} has no rule")

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Keys outside [low, high) are invisible to queries start … stop − 1 of the same row."""
        return 0, length

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part):
        """The rule asked about some queries and some keys of a row only."""
        return self(query.part(rows), key.part(columns))

    def __and__(self, other: "Mask") -> "Mask":
        return All(self.rules() + other.rules())

    def rules(self) -> tuple["Mask", ...]:
        return (self,)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal(Mask):
    """A query at t sees keys at s ≤ t: the lower triangle, diagonal included."""

    needs_positions = False

    def __call__(self, query, key):
        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]

    def key_range(self, start, stop, length):
        return 0, min(stop, length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Window(Mask):
    """A query at t sees keys at s > t − size. With `Causal`: itself and the size − 1 before it."""

    size: int

    @property
    def reach(self):
        return self.size

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"window is {self.size}; it must be at least 1 (a token sees itself)")

    def __call__(self, query, key):
        return key.position_ids()[..., None, :] > query.position_ids()[..., :, None] - self.size

    def key_range(self, start, stop, length):
        return max(0, start - self.size + 1), length


@jax.tree_util.register_static
@dataclass(frozen=True)
class Near(Mask):
    """A query at t sees keys at most `distance` away: |t − s| ≤ distance."""

    distance: int

    def __post_init__(self):
        if self.distance < 1:
            raise ValueError(f"window is {self.distance}; it must be at least 1")

    def __call__(self, query, key):
        offset = key.position_ids()[..., None, :] - query.position_ids()[..., :, None]
        return abs(offset) <= self.distance

    def key_range(self, start, stop, length):
        return max(0, start - self.distance), min(stop + self.distance, length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Prefix(Mask):
    """Causal, but the first `length` positions are seen by all (prefix-LM, Raffel et al. 2020)."""

    length: int

    @property
    def minimum_prefill(self):
        return max(1, self.length)

    def __call__(self, query, key):
        before = key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]
        return before | (key.position_ids()[..., None, :] < self.length)

    def key_range(self, start, stop, length):
        return 0, min(max(stop, self.length), length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Padding(Mask):
    """Keys that are padding or empty slots (segment 0) are seen by no one."""

    needs_positions = False

    def __call__(self, query, key):
        return np.True_ if key.segments is None else (key.segments != 0)[..., None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Packed(Mask):
    """A query sees its own document only; padding sees nothing and is seen by no one."""

    needs_positions = False

    def __call__(self, query, key):
        if query.segments is None or key.segments is None:
            return Padding()(query, key)
        same = query.segments[..., :, None] == key.segments[..., None, :]
        return same & (key.segments != 0)[..., None, :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class All(Mask):
    """Every one of the rules holds (what `&` builds; `All()` lets everyone see everyone)."""

    parts: tuple[Mask, ...] = ()

    @property
    def needs_positions(self):
        return any(rule.needs_positions for rule in self.parts)

    @property
    def minimum_prefill(self):
        return max((rule.minimum_prefill for rule in self.parts), default=1)

    @property
    def reach(self):
        reaches = [rule.reach for rule in self.parts if rule.reach is not None]
        return min(reaches, default=None)

    def __call__(self, query, key):
        return reduce(and_, (rule(query, key) for rule in self.parts), np.True_)

    def tile(self, query, key, rows, columns):
        return reduce(and_, (rule.tile(query, key, rows, columns) for rule in self.parts), np.True_)

    def key_range(self, start, stop, length):
        low, high = 0, length
        for rule in self.parts:
            rule_low, rule_high = rule.key_range(start, stop, length)
            low, high = max(low, rule_low), min(high, rule_high)
        return low, max(low, high)

    def rules(self):
        return self.parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseMask(Mask):
    """No rule but the answers themselves, bool [*batch, queries, keys]: a mask from elsewhere."""

    array: Any
    needs_positions = False

    def __call__(self, query, key):
        return self.array

    def tile(self, query, key, rows, columns):
        return cut(cut(self.array, rows, -2), columns)


@cache
def first_forward_edge(mask: Mask, length: int) -> tuple[int, int] | None:
    """The first (query, key) with key > query that the rule lets through in a row of this length;
    None: the rule is causal there."""
    seen = mask(TokenInfo(length), TokenInfo(length))
    later = np.triu(np.broadcast_to(np.asarray(seen), (length, length)), 1)
    return tuple(map(int, np.argwhere(later)[0])) if later.any() else None
