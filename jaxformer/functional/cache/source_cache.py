"""Cache of a decoder that reads sources."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import checked_rows
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.positions import DocumentCursor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceCache:
    """Cache of a decoder that reads sources.

    Source i serves batch elements `i * n` to `(i + 1) * n - 1`, where n = batch / sources.

    Attributes:
        self_cache: the cache of the decoder's own tokens.
        cross_keys_values: the keys and values of the sources, [sources, kv_heads, source length,
            head_dim], for each layer; None without cross-attention.
        source_segments: int [sources, source length], 0 for padding; None without padding.
        initial: the states, one per row, at which documents begin; None if they begin at zero.
    """

    self_cache: Any
    cross_keys_values: Any
    source_segments: Any
    initial: Any = None

    @classmethod
    def of(
        cls, self_cache: Any, keys_values: Any, source: Inputs, initial: Any = None
    ) -> "SourceCache":
        """Returns the cache of a source, with zeros at its padding because 0 × NaN is NaN."""
        if source.segments is not None:
            is_real = (source.segments != 0)[:, None, :, None]
            keys_values = jax.tree.map(lambda x: jnp.where(is_real, x, 0), keys_values)
        return cls(self_cache, keys_values, source.segments, initial)

    @property
    def source(self) -> TokenInfo:
        """Length and padding of the sources; without cross-attention the length is 0."""
        leaves = jax.tree.leaves(self.cross_keys_values)
        return TokenInfo(leaves[0].shape[-2] if leaves else 0, None, self.source_segments)

    @property
    def layer_states(self) -> list[dict[str, Any]]:
        """The states of each layer, by the names of its sub-layers."""
        return [
            {**own, "cross_attention": cross}
            for own, cross in zip(self.self_cache.layer_states, self.cross_keys_values, strict=True)
        ]

    @property
    def cursor(self) -> DocumentCursor:
        """How far each row has been read."""
        return self.self_cache.cursor

    @property
    def length(self) -> Array:
        """Number of tokens read, int [], padding included."""
        return self.self_cache.length

    @property
    def capacity(self) -> int | None:
        """See `Cache.capacity`."""
        return self.self_cache.capacity

    @property
    def reach(self) -> int | None:
        """See `Cache.reach`."""
        return self.self_cache.reach

    def live_prefix(self, slots: int | None) -> "SourceCache":
        """See `Cache.live_prefix`."""
        return replace(self, self_cache=self.self_cache.live_prefix(slots))

    def merge_prefix(self, prefix: "SourceCache") -> "SourceCache":
        """See `Cache.merge_prefix`."""
        return replace(self, self_cache=self.self_cache.merge_prefix(prefix.self_cache))

    def grow(self, slots: int) -> "SourceCache":
        """See `Cache.grow`."""
        return replace(self, self_cache=self.self_cache.grow(slots))

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> "SourceCache":
        """Returns a cache whose row i is row rows[i] of this one; both must have the same source.

        Raises:
            ValueError: outside jit, if an entry of `rows` is no row or has another source.
        """
        rows = checked_rows(rows, len(self.cursor.position))
        self._check_sources(rows)
        initial = jax.tree.map(lambda x: x[rows], self.initial)
        return replace(self, self_cache=self.self_cache.gather_rows(rows), initial=initial)

    def rewind(self, lengths: ArrayLike | Sequence[Any]) -> "SourceCache":
        """See `Cache.rewind`."""
        return replace(self, self_cache=self.self_cache.rewind(lengths))

    def _check_sources(self, rows: Int[Array | np.ndarray, " rows"]) -> None:
        if self.cross_keys_values is None:
            return
        sources = len(jax.tree.leaves(self.cross_keys_values)[0])
        if len(rows) % sources:
            raise ValueError(f"rows has {len(rows)} entries; the {sources} sources must divide it")
        if isinstance(rows, jax.core.Tracer):
            return
        old, new = (np.arange(n) // (n // sources) for n in (len(self.cursor.position), len(rows)))
        differs = old[rows] != new
        if differs.any():
            row = int(differs.argmax())
            raise ValueError(
                f"rows[{row}] is {rows[row]}, which reads source {old[rows[row]]}; row {row} "
                f"reads source {new[row]}"
            )
