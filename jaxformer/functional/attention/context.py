"""What the queries of a layer attend to: their row, the slots of a cache, or a source."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import Slots, write_slots
from jaxformer.functional.placement import OneDevice, Placement

KeysValues = tuple[Float[Array, "rows kv_heads keys d"], Float[Array, "rows kv_heads keys d"]]


@dataclass(frozen=True)
class Context:
    """What the queries of a layer attend to: their row, the slots of a cache, or a source.

    Attributes:
        mask: which of the keys each query sees.
        queries: positions and documents of the queries.
        keys: positions and documents of the keys.
        scores: scale, cap and bias.
        implementation: "explicit", "blockwise", "fused", or "auto": fused where it supports the
            arguments, otherwise blockwise. "step" is explicit for few queries over a cache: the
            mask excludes padding, and `Cache.live_prefix` has set masked keys to zero.
        written: for a cache, the slot of the first new token, int [], or of each, int [batch, new].
        positions: the positions of the queries, for rotary positions; None: 0, 1, 2, …
        point: the name of the point of the weights.
        in_order: whether positions count the tokens of each document along the row.
        reads: for a cache, the keys and values that `store` returns: those of its slots after the
            new tokens are written, of the new tokens only, or of the slots before they are written,
            followed by those of the new tokens.
        placement: the fused kernels of the platform, and how arrays are sharded.
    """

    mask: Mask
    queries: TokenInfo
    keys: TokenInfo
    scores: Scores = Scores()  # noqa: RUF009 (frozen)
    implementation: str = "auto"
    written: Int[Array, "*tokens"] | None = None
    positions: Int[Array, "*batch queries"] | None = None
    point: str = "attention.weights"
    in_order: bool = False
    reads: Literal["slots", "new tokens", "slots before, and new tokens"] = "slots"
    placement: Placement = OneDevice()  # noqa: RUF009 (frozen)

    def store(
        self, key: Array, value: Array, cached: Slots | None
    ) -> tuple[KeysValues, Slots | None]:
        """Writes the keys and values of new tokens to the cache of a layer, if there is one.

        Returns:
            (the keys and values to attend to, the cache of the layer).
        """
        if cached is None or self.written is None:
            return (key, value), None
        old = (cached.keys, cached.values)
        keys, values = (
            write_slots(slots, new, self.written)
            for slots, new in zip(old, (key, value), strict=True)
        )
        if self.written.ndim == 0:
            keys, values = (self.placement.place("cache.slots", x) for x in (keys, values))
        after = replace(cached, keys=keys, values=values)
        if self.reads == "new tokens":
            return (key, value), after
        if self.reads == "slots":
            return (keys, values), after
        before = (x.astype(new.dtype) for x, new in zip(old, (key, value), strict=True))
        both = [jnp.concatenate(x, axis=-2) for x in zip(before, (key, value), strict=True)]
        return (both[0], both[1]), after
