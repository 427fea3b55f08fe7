"""Attention masks as rules about positions instead of arrays.

A mask is a small frozen dataclass. It is hashable, so it can be static under jit. It has two
methods:

- `rule(query, key)` returns which of the keys each query may see.
- `rule.key_range(start, stop, length)` returns a range of keys outside of which the queries start …
  stop − 1 of a row see no key, so that no work is needed there.

The operator `&` combines masks.

All code paths use the same rule. Explicit attention applies it to the whole row, blockwise
attention to one block at a time, and a cache to the positions stored in its slots. For positions
that are known while tracing the result is a NumPy array and remains static.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool

from jaxformer.functional.arguments import whole_number
from jaxformer.functional.attention.token_info import Part, TokenInfo, cut

# Which keys each query sees: a NumPy array or scalar where that is known while tracing.
Visible = Bool[Array | np.ndarray, "..."] | np.bool_


@cache
def _make_static(mask_class: type) -> None:
    """Registers a class of masks as a static pytree, unless it is registered already."""
    if mask_class.__hash__ is None:
        raise ValueError(
            f"{mask_class.__name__} is not hashable, but a mask must be: decorate it with "
            "@dataclass(frozen=True)"
        )
    with suppress(ValueError):  # the class is registered already
        jax.tree_util.register_static(mask_class)


# What a class of masks says about its rule, apart from `__call__`.
_DESCRIPTIONS = ("needs_positions", "minimum_prefill", "reach", "key_range", "rules")


class Mask:
    """Base class of masks: rules about positions.

    Subclasses are frozen dataclasses with hashable fields. Their `__call__` must use operators that
    NumPy and JAX arrays share: it receives positions that are known while tracing as well as those
    stored in a cache.

    A class that overrides the `__call__` of another mask inherits none of the attributes below and
    no `key_range` from it, because they describe the other rule.

    Attributes:
        needs_positions: True if the rule counts positions within a document. False if it only
            compares the order of two tokens, which equals their order along the row, with padding
            or without.
        minimum_prefill: how many tokens at the start of a document must be read in one call,
            because they see later ones.
        reach: how many tokens back a query may see, itself included. None: all.
    """

    needs_positions = True
    minimum_prefill = 1
    reach: int | None = None

    def __init_subclass__(cls) -> None:
        """Sets the descriptions of another rule back to those of any rule."""
        super().__init_subclass__()
        for name in _DESCRIPTIONS:
            owner = next(base for base in cls.__mro__ if name in vars(base))
            has_rule = issubclass(owner, Mask) and owner.__call__ is not Mask.__call__
            if has_rule and owner.__call__ is not cls.__call__ and owner is not cls:
                setattr(cls, name, vars(Mask)[name])

    def __new__(cls, *arguments: Any, **fields: Any) -> "Mask":
        """Registers the class as a static pytree."""
        _make_static(cls)
        return super().__new__(cls)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """Returns whether each query may see each key.

        Args:
            query: positions and documents of the queries.
            key: positions and documents of the keys.

        Returns:
            bool [*batch, query length, key length], or an array that broadcasts to it.
        """
        raise TypeError(f"{type(self).__name__} has no rule")

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Returns (low, high); queries start … stop − 1 of a row see no key outside [low, high)."""
        return 0, length

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part) -> Visible:
        """Applies the rule to some of the queries and some of the keys of a row."""
        return self(query.part(rows), key.part(columns))

    def __and__(self, other: "Mask") -> "Mask":
        """Returns the mask that allows only the pairs that both masks allow."""
        return All(self.rules() + other.rules())

    def rules(self) -> tuple["Mask", ...]:
        """Returns the masks that `&` has combined."""
        return (self,)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal(Mask):
    """A query at t sees keys at s ≤ t: the lower triangle, diagonal included."""

    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        return 0, min(stop, length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Window(Mask):
    """A query at t sees keys at s > t − size; with `Causal`, itself and size − 1 tokens before."""

    size: int

    @property
    def reach(self) -> int | None:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        return self.size

    def __post_init__(self) -> None:
        """Checks `size`."""
        whole_number("size (a token sees itself)", self.size, 1)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return key.position_ids()[..., None, :] > query.position_ids()[..., :, None] - self.size

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        return max(0, start - self.size + 1), length


@jax.tree_util.register_static
@dataclass(frozen=True)
class Near(Mask):
    """A query at t sees keys at a distance of at most `distance`: |t − s| ≤ distance."""

    distance: int

    def __post_init__(self) -> None:
        """Checks `distance`."""
        whole_number("distance", self.distance, 1)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        offset = key.position_ids()[..., None, :] - query.position_ids()[..., :, None]
        return abs(offset) <= self.distance

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        return max(0, start - self.distance), min(stop + self.distance, length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Prefix(Mask):
    """Causal, but every query sees the first `length` positions (prefix-LM, Raffel et al. 2020)."""

    length: int

    def __post_init__(self) -> None:
        """Checks `length`."""
        whole_number("length", self.length, 0)

    @property
    def minimum_prefill(self) -> int:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        return max(1, self.length)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        before = key.position_ids()[..., None, :] <= query.position_ids()[..., :, None]
        return before | (key.position_ids()[..., None, :] < self.length)

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        return 0, min(max(stop, self.length), length)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Padding(Mask):
    """No query sees a key that is padding or an empty slot (segment 0)."""

    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return np.True_ if key.segments is None else (key.segments != 0)[..., None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Packed(Mask):
    """A query sees only its own document; padding sees no key and no query sees padding."""

    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        if query.segments is None or key.segments is None:
            return Padding()(query, key)
        same = query.segments[..., :, None] == key.segments[..., None, :]
        return same & (key.segments != 0)[..., None, :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class All(Mask):
    """Conjunction of masks, which `&` builds. `All()` lets every query see every key."""

    parts: tuple[Mask, ...] = ()

    def __init_subclass__(cls) -> None:
        """Raises TypeError: the conjunction is taken apart, so a subclass would be ignored."""
        raise TypeError(f"{cls.__name__} derives from All; derive it from Mask, and combine with &")

    @property
    def needs_positions(self) -> bool:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        return any(rule.needs_positions for rule in self.parts)

    @property
    def minimum_prefill(self) -> int:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        return max((rule.minimum_prefill for rule in self.parts), default=1)

    @property
    def reach(self) -> int | None:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        reaches = [rule.reach for rule in self.parts if rule.reach is not None]
        return min(reaches, default=None)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return reduce(and_, (rule(query, key) for rule in self.parts), np.True_)

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part) -> Visible:
        """See `Mask`."""
        return reduce(and_, (rule.tile(query, key, rows, columns) for rule in self.parts), np.True_)

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        low, high = 0, length
        for rule in self.parts:
            rule_low, rule_high = rule.key_range(start, stop, length)
            low, high = max(low, rule_low), min(high, rule_high)
        return low, max(low, high)

    def rules(self) -> tuple[Mask, ...]:
        """See `Mask`."""
        return self.parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseMask(Mask):
    """A mask stored as an array, bool [*batch, queries, keys], instead of a rule."""

    array: Any
    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return self.array

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part) -> Visible:
        """See `Mask`."""
        return cut(cut(self(query, key), rows, -2), columns)
