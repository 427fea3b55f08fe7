"""Caches without slots, which hold one state of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jaxtyping import Array, ArrayLike

from jaxformer.functional.cache.key_values import checked_rows
from jaxformer.functional.positions import DocumentCursor


@dataclass(frozen=True)
class FixedSizeState:
    """Base class of these caches.

    Subclasses are frozen dataclasses whose arrays, except `length`, have a batch axis first.

    Attributes:
        cursor: how far each row has been read.
        length: int [], number of tokens read, padding included.
    """

    capacity = None
    reach = None
    cursor: DocumentCursor
    length: Array

    def live_prefix(self, slots: None) -> "FixedSizeState":
        """Returns the cache: it has no slots."""
        return self

    def merge_prefix(self, prefix: "FixedSizeState") -> "FixedSizeState":
        """Returns `prefix`, which replaces the whole cache."""
        return prefix

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> "FixedSizeState":
        """See `Cache.gather_rows`."""
        rows = checked_rows(rows, len(self.cursor.position))
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)

    def rewind(self, lengths: ArrayLike | Sequence[Any]) -> NoReturn:
        """Raises ValueError, because the cache does not store earlier states."""
        raise ValueError(
            f"a {type(self).__name__} is a state of one size, which has no earlier states to "
            "rewind to; keep the cache from before the tokens instead"
        )
