"""Attention masks as rules about positions instead of arrays.

A mask is a small frozen dataclass. Masks are hashable, so they can be static under jit. A mask has
two methods:

- `mask(query, key)` returns which keys each query may attend to.
- `mask.key_range(start, stop, length)` returns a range that contains all keys that queries start …
  stop − 1 attend to. Keys outside this range are skipped.

The operator `&` combines masks.

All implementations of attention evaluate the same mask. Explicit attention applies the mask to the
whole sequence, blockwise attention to one block at a time, and decoding to the positions stored in
the cache. If positions are known while tracing, the result is a static NumPy array.
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

# Array that is True for the keys that each query attends to. It is a NumPy array or scalar if its
# values are known during tracing.
Visible = Bool[Array | np.ndarray, "..."] | np.bool_


@cache
def _make_static(mask_class: type) -> None:
    """Registers a mask class as a static pytree, if not already registered."""
    if mask_class.__hash__ is None:
        raise ValueError(
            f"{mask_class.__name__} is not hashable, but a mask must be: decorate it with "
            "@dataclass(frozen=True)"
        )
    # JAX raises ValueError if the class is already registered.
    with suppress(ValueError):
        jax.tree_util.register_static(mask_class)


# Besides `__call__`, these attributes and methods describe the rule of a mask class.
_DESCRIPTIONS = ("needs_positions", "minimum_prefill", "reach", "key_range", "rules")


class Mask:
    """Base class of masks: rules about positions.

    Subclasses are frozen dataclasses with hashable fields. The `__call__` of a subclass must work
    for NumPy and JAX arrays. Positions that are known while tracing are NumPy arrays, and positions
    in a cache are JAX arrays.

    If a subclass of a mask such as `Causal` overrides `__call__`, it inherits `key_range` and the
    attributes below from `Mask` instead of `Causal`, because the attributes of `Causal` may be
    wrong for the new rule.

    Attributes:
        needs_positions: True if the rule needs positions within a document. False if the rule only
            compares the order of two tokens. Such a rule also works with indices in the sequence.
        minimum_prefill: how many tokens at the start of a document must be read in one call,
            because they attend to later tokens.
        reach: the window size, which is the number of tokens that a query may attend to, itself
            included. None if a query may attend to any number of tokens.
    """

    needs_positions = True
    minimum_prefill = 1
    reach: int | None = None

    def __init_subclass__(cls) -> None:
        """Resets inherited attributes to the defaults of `Mask` if `__call__` is overridden."""
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
        """Returns whether each query may attend to each key.

        Args:
            query: positions and documents of the queries.
            key: positions and documents of the keys.

        Returns:
            bool [*batch, query length, key length], or an array that broadcasts to it.
        """
        raise TypeError(f"{type(self).__name__} must override __call__")

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Returns (low, high): queries start … stop − 1 attend only to keys in [low, high)."""
        return 0, length

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part) -> Visible:
        """Evaluates the mask for a part of the queries and a part of the keys."""
        return self(query.part(rows), key.part(columns))

    def __and__(self, other: "Mask") -> "Mask":
        """Combines two masks: a query may attend to a key only if both masks allow it."""
        return All(self.rules() + other.rules())

    def rules(self) -> tuple["Mask", ...]:
        """Returns the masks that `&` combined into this mask."""
        return (self,)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Causal(Mask):
    """Causal mask: a query at position t attends to keys at s ≤ t (a lower triangular matrix)."""

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
    """Sliding window: a query at position t attends to keys at s > t − size.

    With `Causal`, a query attends to itself and to the `size` − 1 tokens before.
    """

    size: int

    @property
    def reach(self) -> int | None:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        return self.size

    def __post_init__(self) -> None:
        """Checks `size`."""
        whole_number("size (which includes the token itself)", self.size, 1)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return key.position_ids()[..., None, :] > query.position_ids()[..., :, None] - self.size

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        return max(0, start - self.size + 1), length


@jax.tree_util.register_static
@dataclass(frozen=True)
class Near(Mask):
    """Symmetric window: a query at position t attends to keys at s with |t − s| ≤ `distance`."""

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
    """Prefix-LM mask: causal, but all queries attend to the first `length` keys.

    Reference:
        Raffel et al. 2020.
    """

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
    """Hides padding and empty slots of a cache, whose segment id is 0, from all queries."""

    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        return np.True_ if key.segment_ids is None else (key.segment_ids != 0)[..., None, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Packed(Mask):
    """A query attends only to keys of its own document; padding is hidden and attends to no key."""

    needs_positions = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        if query.segment_ids is None or key.segment_ids is None:
            return Padding()(query, key)
        same = query.segment_ids[..., :, None] == key.segment_ids[..., None, :]
        return same & (key.segment_ids != 0)[..., None, :]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class All(Mask):
    """Conjunction of masks, built by `&`. With `All()`, every query attends to every key."""

    parts: tuple[Mask, ...] = ()

    def __init_subclass__(cls) -> None:
        """Raises TypeError for every subclass, because `rules` would ignore overridden methods."""
        raise TypeError(
            f"{cls.__name__} derives from All; derive it from Mask, and combine masks with &"
        )

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
