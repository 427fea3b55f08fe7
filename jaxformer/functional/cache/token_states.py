"""The states of a sub-layer after each token of a pass, so that tokens can be dropped again."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.functional.attention.token_info import TokenInfo


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
