"""Masks that a user gives as an array or as a function of positions.

Functions such as `dot_product_attention` take an array of booleans, or of 0 and 1, for one call.
The mask of a model must be hashable and must also apply to cached tokens, so a model converts an
array to a `TableMask`. A function of positions becomes a `FunctionMask` for one call and in models.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

from jaxformer.functional.attention.masks import Mask, Visible
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.symbolic import broadcasts
from jaxformer.terminal import kind_of

# Returns booleans of two integer arrays that broadcast, the positions of queries and keys.
MaskFunction = Callable[[Any, Any], Any]


@jax.tree_util.register_static
@dataclass(frozen=True)
class TableMask(Mask):
    """A mask given as a table: a query at position t attends to key s if table[t, s] is True.

    Beyond the last position of the table, queries attend to no key, and keys are hidden.

    Attributes:
        size: the number of positions.
        bits: the entries of the table, row by row, one bit for each entry, in base 64.
    """

    size: int
    bits: str

    @classmethod
    def of(cls, table: Shaped[Array | np.ndarray, "queries keys"]) -> "TableMask":
        """Returns the mask of a square array of booleans, or of 0 and 1.

        Raises:
            ValueError: The array is not square or has other values.
        """
        shape = tuple(table.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(
                f"mask has shape {shape}; the mask of a model must be [max_length, max_length]"
            )
        packed = np.packbits(np.asarray(as_booleans(table)))
        return cls(shape[0], b64encode(packed.tobytes()).decode())

    def table(self) -> Bool[np.ndarray, "size size"]:
        """Returns the table."""
        return _unpacked(self.size, self.bits)

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        queries, keys = (x.position_ids() for x in (query, key))
        inside = ((queries >= 0) & (queries < self.size))[..., :, None]
        inside = inside & ((keys >= 0) & (keys < self.size))[..., None, :]
        is_static = isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray)
        table, clip = (
            (self.table(), np.clip) if is_static else (jnp.asarray(self.table()), jnp.clip)
        )
        rows, columns = (clip(x, 0, self.size - 1) for x in (queries, keys))
        return table[rows[..., :, None], columns[..., None, :]] & inside

    @property
    def minimum_prefill(self) -> int:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `Mask`."""
        later = np.flatnonzero(np.triu(self.table(), 1).any(axis=0))
        return int(later[-1]) + 1 if len(later) else 1


@cache
def _unpacked(size: int, bits: str) -> Bool[np.ndarray, "size size"]:
    packed = np.frombuffer(b64decode(bits), np.uint8)
    return np.unpackbits(packed, count=size**2).astype(bool).reshape(size, size)


@jax.tree_util.register_static
@dataclass(frozen=True)
class FunctionMask(Mask):
    """A mask given as a function of positions, such as `lambda query, key: key <= query`.

    Attributes:
        allows: function of two integer arrays that broadcast, the positions of queries and keys. It
            returns True where the query may attend to the key.
    """

    allows: MaskFunction

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`.

        Raises:
            ValueError: The function does not return booleans, or their shape does not fit the
                positions.
        """
        queries, keys = query.position_ids()[..., :, None], key.position_ids()[..., None, :]
        visible = self.allows(queries, keys)
        visible = np.bool_(visible) if isinstance(visible, bool) else visible
        pairs = jnp.broadcast_shapes(queries.shape, keys.shape)
        is_array = isinstance(visible, jax.Array | np.ndarray | np.bool_)
        if is_array and visible.dtype == bool and broadcasts(visible.shape, pairs):
            return visible
        found = f"{visible.dtype} {visible.shape}" if is_array else kind_of(visible)
        raise ValueError(
            f"mask returns {found} for positions of queries {queries.shape} and of keys "
            f"{keys.shape}; it must return an array of booleans that broadcasts to {pairs}"
        )


def as_mask(mask: Any) -> Mask | None:
    """Converts an array or a function of positions to a `Mask`; a `Mask` remains unchanged.

    Raises:
        ValueError: The mask has another type, or is an array that is not square.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, jax.Array | np.ndarray):
        return TableMask.of(mask)
    # A callable dataclass, such as a norm, is not a function of positions.
    if callable(mask) and not is_dataclass(mask):
        return FunctionMask(mask)
    raise ValueError(
        f"mask is {kind_of(mask)}; it must be a jaxformer.functional.Mask, an array of "
        "booleans or of 0 and 1, or a function of the positions of a query and a key"
    )


def as_booleans(
    mask: Shaped[Array | np.ndarray, "*batch queries keys"],
) -> Bool[Array | np.ndarray, "*batch queries keys"]:
    """Converts a mask of 0 and 1 to booleans; 1 means that a query may attend to a key.

    Traced integers are converted by comparison with 0, because their values are unknown.

    Raises:
        ValueError: The array has other values, or is a traced array of floats.
    """
    if mask.dtype == bool:
        return mask
    if isinstance(mask, jax.core.Tracer):
        is_valid = np.issubdtype(mask.dtype, np.integer)
    else:
        is_valid = bool(np.isin(np.asarray(mask), (0, 1)).all())
    if not is_valid:
        raise ValueError(
            f"mask is {mask.dtype} [{', '.join(map(str, mask.shape))}]; an array must have the "
            "values True and False, or 1 and 0, where 1 means that a query may attend to a key. "
            "For scores of 0 and −∞, pass scores == 0"
        )
    return mask != 0
