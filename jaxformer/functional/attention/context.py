"""Context of attention: which keys the queries of a layer attend to, and how."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import Slots, write_key_values
from jaxformer.functional.placement import OneDevice, Placement

KeysValues = tuple[Float[Array, "batch kv_heads keys d"], Float[Array, "batch kv_heads keys d"]]


@dataclass(frozen=True)
class Context:
    """Keys, mask and scores of attention in one layer.

    The keys come from the same sequence, a cache, or an encoder's output.

    Attributes:
        mask: which keys each query attends to.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        scores: scale, soft cap and bias of the scores.
        implementation: "explicit", "blockwise", "fused", "auto" or "step". "auto" selects a fused
            kernel that supports the arguments, otherwise blockwise attention. "step" is explicit
            attention for few queries and a cache with zeros in empty slots (`Cache.live_prefix`).
        written: the slots of the new tokens in a cache; see `cache.slots.write_token_info`.
        positions: the positions of the queries for the rotary encoding; defaults to 0, 1, 2, …
        name: the name of the sub-layer, which is the prefix of the names of its hook points.
        in_order: whether positions count the tokens of each document in order.
        reads: which keys and values `store` returns if there is a cache. "slots" selects all
            cache slots after writing the new tokens. "new tokens" selects only the new tokens.
            "slots before, and new tokens" selects the cache slots without the new tokens, followed
            by the new tokens.
        placement: the fused kernels of the platform, and how arrays are sharded.
    """

    mask: Mask
    queries: TokenInfo
    keys: TokenInfo
    scores: Scores = Scores()  # noqa: RUF009 (frozen)
    implementation: str = "auto"
    written: Int[Array, "*tokens"] | None = None
    positions: Int[Array, "*batch queries"] | None = None
    name: str = "attention"
    in_order: bool = False
    reads: Literal["slots", "new tokens", "slots before, and new tokens"] = "slots"
    placement: Placement = OneDevice()  # noqa: RUF009 (frozen)

    def store(
        self, key: Array, value: Array, cached: Slots | None
    ) -> tuple[KeysValues, Slots | None]:
        """Writes the keys and values of new tokens into the cache of a layer, if any.

        Returns:
            (keys_values, slots): the keys and values to attend to, and the updated cache of the
            layer.
        """
        if cached is None or self.written is None:
            return (key, value), None
        old = (cached.keys, cached.values)
        keys, values = (
            write_key_values(slots, new, self.written)
            for slots, new in zip(old, (key, value), strict=True)
        )
        if self.written.ndim == 0:
            keys, values = (self.placement.place("cache.key_values", x) for x in (keys, values))
        after = replace(cached, keys=keys, values=values)
        if self.reads == "new tokens":
            return (key, value), after
        if self.reads == "slots":
            return (keys, values), after
        before = (x.astype(new.dtype) for x, new in zip(old, (key, value), strict=True))
        both = [jnp.concatenate(x, axis=-2) for x in zip(before, (key, value), strict=True)]
        return (both[0], both[1]), after
