"""The state that a layer keeps between passes: keys and values, or recurrent states."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo


def write_token_info(
    slots: Shaped[Array, "batch slots"],
    new: Shaped[Array, "batch new"],
    written: Int[Array, "*tokens"],
) -> Shaped[Array, "batch slots"]:
    """Writes positions or documents of new tokens into a table of slots.

    Args:
        slots: the positions or documents of the cached tokens, [batch, slots].
        new: the values to write, [batch, new].
        written: the slot of each value, int [batch, new]; a value whose slot does not exist is
            dropped. If `written` is int [], it is the slot of the first value. The remaining values
            are written to the slots that follow, and all values must fit.
    """
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=1)
    batch_indices = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    return slots.at[batch_indices, written].set(new, mode="drop")


def write_key_values(
    slots: Float[Array, "batch kv_heads slots d"],
    new: Float[Array, "batch kv_heads new d"],
    written: Int[Array, "*tokens"],
) -> Float[Array, "batch kv_heads slots d"]:
    """Writes keys or values of new tokens into the slots of a layer; see `write_token_info`."""
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=2)
    batch_indices = jnp.arange(len(new), dtype=jnp.int32)[:, None]
    return slots.at[batch_indices, :, written].set(new.swapaxes(1, 2), mode="drop")


def overwrite(x: Array, start_of_x: Array) -> Array:
    """Returns x with its start replaced by `start_of_x`."""
    return jax.lax.dynamic_update_slice(x, start_of_x, (0,) * x.ndim)


class KeyValueSize(NamedTuple):
    """Size of the keys and values that a layer caches per token.

    Attributes:
        kv_heads: number of key heads.
        head_dim: width of a head.
        reach: the window size, which is the number of tokens that a query attends to, itself
            included. None if a query attends to all tokens.
    """

    kv_heads: int
    head_dim: int
    reach: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Cached keys and values of one layer.

    Attributes:
        keys: [batch, kv_heads, slots, head_dim].
        values: [batch, kv_heads, slots, head_dim].
        reach: the window size that selects the table of these slots; see `Cache.reaches`.
    """

    # The arrays have the type `Any`, because JAX also fills these fields with placeholders.
    keys: Any
    values: Any
    reach: int | None = field(default=None, metadata={"static": True})

    def live_part(self, documents: Int[Array, "batch live"]) -> "Slots":
        """Returns the first slots, with zeros in the empty slots.

        Args:
            documents: the document of the token in each returned slot; 0 for an empty slot.
        """
        is_used, live = (documents != 0)[:, None, :, None], documents.shape[1]
        keys, values = (jnp.where(is_used, x[:, :, :live], 0) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def merge(self, part: "Slots") -> "Slots":
        """Returns a copy whose first slots have the keys and values of `part`."""
        keys, values = overwrite(self.keys, part.keys), overwrite(self.values, part.values)
        return replace(self, keys=keys, values=values)

    def grow(self, num_slots: int) -> "Slots":
        """Appends empty slots, so that there are `num_slots` slots."""
        widths = ((0, 0), (0, 0), (0, num_slots - self.keys.shape[2]), (0, 0))
        keys, values = (jnp.pad(x, widths) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceKeysValues:
    """Keys and values that a cross-attention layer has computed from the sources.

    They never change. Source i serves batch elements `i * n` to `(i + 1) * n - 1`, where n = batch
    / sources.

    Attributes:
        keys: [sources, kv_heads, source length, head_dim].
        values: [sources, kv_heads, source length, head_dim].
    """

    keys: Any
    values: Any

    @classmethod
    def of(cls, keys_values: tuple[Array, Array], source: TokenInfo) -> "SourceKeysValues":
        """Sets keys and values of padding to zero, because 0 × NaN is NaN."""
        if source.segment_ids is None:
            return cls(*keys_values)
        is_real = (source.segment_ids != 0)[:, None, :, None]
        return cls(*(jnp.where(is_real, x, 0) for x in keys_values))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStates:
    """Recurrent states of a sub-layer: before a forward pass, and after each token of the pass.

    Attributes:
        states: a tree of arrays [batch, 1 + new, …].
        counts: int [batch, 1 + new], the number of tokens of the pass before each state, without
            padding.
        index: int [batch], the index of each batch element's current state.
    """

    # The arrays have the type `Any`, because JAX also fills these fields with placeholders.
    states: Any
    counts: Any
    index: Any

    @classmethod
    def of(cls, name: str, before: Any, after: Any, tokens: TokenInfo) -> "TokenStates":
        """Combines the state before a forward pass with the states after each token.

        Args:
            name: the name of the sub-layer.
            before: the state before the pass, a tree of arrays [batch, …].
            after: the state after each token, [batch, new, …].
            tokens: the tokens of the forward pass.

        Raises:
            ValueError: `after` does not have the shapes [batch, new, …], for example because the
                sub-layer returned only its last state.
        """
        new = tokens.length

        def joined(first: Array, rest: Array) -> Array:
            if rest.shape != (first.shape[0], new, *first.shape[1:]):
                raise ValueError(
                    f"keep_states is True, but the sub-layer {name!r} returned a state of shape "
                    f"{rest.shape}. A sub-layer must return {new} states, one per token, if its "
                    "argument `at` has keeps_states=True"
                )
            return jnp.concatenate([first[:, None], rest.astype(first.dtype)], axis=1)

        states = jax.tree.map(joined, before, after)
        batch_size = jax.tree.leaves(before)[0].shape[0]
        is_token = (
            jnp.ones((batch_size, new), bool)
            if tokens.segment_ids is None
            else tokens.segment_ids != 0
        )
        counts = jnp.pad(is_token.cumsum(axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        return cls(states, counts, jnp.full(batch_size, new, jnp.int32))

    @property
    def now(self) -> Any:
        """The current state of each batch element, a tree of arrays [batch, …]."""
        batch_indices = jnp.arange(len(self.index), dtype=jnp.int32)
        return jax.tree.map(lambda x: x[batch_indices, self.index], self.states)

    @property
    def longest_rewind(self) -> Int[Array, " batch"]:
        """The number of tokens that each batch element can drop."""
        return jnp.take_along_axis(self.counts, self.index[:, None], axis=1)[:, 0]

    def rewind(self, lengths: Int[Array, " batch"]) -> "TokenStates":
        """Drops the last lengths[i] tokens of batch element i.

        Padding after the last remaining token is also dropped.
        """
        remaining = self.longest_rewind - lengths
        index = (self.counts == remaining[:, None]).argmax(axis=1)
        return replace(self, index=index.astype(jnp.int32))
