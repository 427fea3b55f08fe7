"""What a layer keeps of the tokens that it has read: keys and values, or states."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo


def write_rows(
    slots: Shaped[Array, "batch slots"],
    new: Shaped[Array, "batch new"],
    written: Int[Array, "*tokens"],
) -> Shaped[Array, "batch slots"]:
    """Writes `new` [batch, new] into `slots` [batch, slots].

    Args:
        slots: The slots of each batch element.
        new: The values to write.
        written: The slot of each value, int [batch, new]; a value whose slot does not exist is
            dropped. Or the slot of the first value, int []; all values must then fit.
    """
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=1)
    rows = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    return slots.at[rows, written].set(new, mode="drop")


def write_slots(
    slots: Float[Array, "batch kv_heads slots d"],
    new: Float[Array, "batch kv_heads new d"],
    written: Int[Array, "*tokens"],
) -> Float[Array, "batch kv_heads slots d"]:
    """Writes keys or values into a cache's slots, as `write_rows` does."""
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=2)
    rows = jnp.arange(len(new), dtype=jnp.int32)[:, None]
    return slots.at[rows, :, written].set(new.swapaxes(1, 2), mode="drop")


def overwrite(x: Array, start_of_x: Array) -> Array:
    """Returns x with its start replaced by `start_of_x`."""
    return jax.lax.dynamic_update_slice(x, start_of_x, (0,) * x.ndim)


class SlotSize(NamedTuple):
    """The size of the keys and values of a token in a layer.

    Attributes:
        kv_heads: number of key heads.
        head_dim: width of a head.
        reach: how many tokens a token sees, itself included; None: all.
    """

    kv_heads: int
    head_dim: int
    reach: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Keys and values of the tokens that a layer has read.

    Attributes:
        keys: [batch, kv_heads, slots, head_dim].
        values: [batch, kv_heads, slots, head_dim].
        reach: the reach of their table; see `Cache`.
    """

    keys: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    values: Any
    reach: int | None = field(default=None, metadata={"static": True})

    def live_part(self, documents: Int[Array, "batch live"]) -> "Slots":
        """Returns the first slots, with zeros in the empty ones, whose document is 0."""
        is_used, live = (documents != 0)[:, None, :, None], documents.shape[1]
        keys, values = (jnp.where(is_used, x[:, :, :live], 0) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def merge(self, part: "Slots") -> "Slots":
        """Returns `part` followed by the remaining slots."""
        keys, values = overwrite(self.keys, part.keys), overwrite(self.values, part.values)
        return replace(self, keys=keys, values=values)

    def grow(self, slots: int) -> "Slots":
        """Returns the slots with empty ones appended, so that there are `slots`."""
        widths = ((0, 0), (0, 0), (0, slots - self.keys.shape[2]), (0, 0))
        keys, values = (jnp.pad(x, widths) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceSlots:
    """Keys and values of the sources, which never change.

    Source i serves batch elements `i * n` to `(i + 1) * n - 1`, where n = batch / sources.

    Attributes:
        keys: [sources, kv_heads, source length, head_dim].
        values: [sources, kv_heads, source length, head_dim].
    """

    keys: Any
    values: Any

    @classmethod
    def of(cls, keys_values: tuple[Array, Array], source: TokenInfo) -> "SourceSlots":
        """Returns the slots of a source, with zeros at its padding because 0 × NaN is NaN."""
        if source.segments is None:
            return cls(*keys_values)
        is_real = (source.segments != 0)[:, None, :, None]
        return cls(*(jnp.where(is_real, x, 0) for x in keys_values))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStates:
    """The state before a pass and after each of its tokens, of a sub-layer without slots.

    Attributes:
        states: a tree of arrays [batch, 1 + new, …].
        counts: int [batch, 1 + new], the number of tokens read before each state, without padding.
        index: int [batch], the current state of each row.
    """

    states: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    counts: Any
    index: Any

    @classmethod
    def of(cls, name: str, before: Any, after: Any, tokens: TokenInfo) -> "TokenStates":
        """Returns the states of a pass.

        Args:
            name: the name of the sub-layer.
            before: the state before the pass, a tree of arrays [batch, …].
            after: the state after each token, [batch, new, …].
            tokens: the tokens of the pass.

        Raises:
            ValueError: `after` has other shapes: the sub-layer returned its last state only.
        """
        new = tokens.length

        def joined(first: Array, rest: Array) -> Array:
            if rest.shape != (first.shape[0], new, *first.shape[1:]):
                raise ValueError(
                    f"keep_states is True; the sub-layer {name!r} returned a state of shape "
                    f"{rest.shape}, not one for each of the {new} tokens. It must return them if "
                    "at.keeps_states is True"
                )
            return jnp.concatenate([first[:, None], rest.astype(first.dtype)], axis=1)

        states = jax.tree.map(joined, before, after)
        rows = jax.tree.leaves(before)[0].shape[0]
        is_token = jnp.ones((rows, new), bool) if tokens.segments is None else tokens.segments != 0
        counts = jnp.pad(is_token.cumsum(axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        return cls(states, counts, jnp.full(rows, new, jnp.int32))

    @property
    def now(self) -> Any:
        """The current state of each row, a tree of arrays [batch, …]."""
        rows = jnp.arange(len(self.index), dtype=jnp.int32)
        return jax.tree.map(lambda x: x[rows, self.index], self.states)

    @property
    def longest_rewind(self) -> Int[Array, " batch"]:
        """How many tokens each row can drop."""
        return jnp.take_along_axis(self.counts, self.index[:, None], axis=1)[:, 0]

    def rewind(self, lengths: Int[Array, " batch"]) -> "TokenStates":
        """Drops the last lengths[i] tokens of row i, and the padding after the remaining ones."""
        remaining = self.longest_rewind - lengths
        index = (self.counts == remaining[:, None]).argmax(axis=1)
        return replace(self, index=index.astype(jnp.int32))
