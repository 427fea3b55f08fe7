"""Arrays as JSON: base64 of compressed bytes, with 8-bit or 16-bit rounding.

A packed array is {"type", "shape", "data"} and, for "int8", "scales" and "axis". `page/arrays.js`
reads it.
"""

import base64
import zlib
from typing import Any

import numpy as np
from jaxtyping import Float, Num, UInt8


def pack(array: Num[np.ndarray, "*shape"], kind: str) -> dict[str, Any]:
    """Returns an array as a JSON object.

    Args:
        array: The array.
        kind: The type of the stored numbers: "uint8", "int32", "float16" or "float32".
    """
    stored = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
    return {"type": kind, "shape": list(stored.shape), "data": _text(stored)}


def pack_int8(array: Float[np.ndarray, "*shape"], axis: int) -> dict[str, Any]:
    """Returns a matrix as 8-bit integers with one scale for each slice along `axis`."""
    codes, scales = quantize(array, axis)
    return {**pack(codes, "int8"), "scales": pack(scales, "float32"), "axis": axis % array.ndim}


def quantize(
    array: Float[np.ndarray, "*shape"], axis: int
) -> tuple[Num[np.ndarray, "*shape"], Float[np.ndarray, "..."]]:
    """Rounds an array to integers in −127 … 127 times a scale.

    Args:
        array: The array.
        axis: The axis along which numbers share a scale: that of a kernel's inputs.

    Returns:
        The integers, and the scales with size 1 along `axis`. An entry differs from its product by
        at most half a scale.
    """
    scales = (np.abs(array).max(axis=axis, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(array / np.where(scales == 0, 1, scales))
    return np.clip(codes, -127, 127).astype(np.int8), scales


def pack_rows(rows: Float[np.ndarray, "*batch keys"]) -> dict[str, Any]:
    """Returns attention weights as 8-bit integers, relative to the largest weight of each row.

    The page divides each row by its sum, so rows still sum to 1.
    """
    return pack(quantize_rows(rows), "uint8")


def quantize_rows(rows: Float[np.ndarray, "*batch keys"]) -> UInt8[np.ndarray, "*batch keys"]:
    """Rounds each row to 0 … 255, where 255 is the row's largest entry."""
    largest = rows.max(axis=-1, keepdims=True)
    return np.rint(255 * rows / np.where(largest == 0, 1, largest)).astype(np.uint8)


def _text(array: Num[np.ndarray, "*shape"]) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 6)).decode()


def unpack(packed: dict[str, Any]) -> Num[np.ndarray, "*shape"]:
    """Returns the array of `pack` or `pack_int8`."""
    stored = zlib.decompress(base64.b64decode(packed["data"]))
    array = np.frombuffer(stored, np.dtype(packed["type"]).newbyteorder("<"))
    array = array.reshape(packed["shape"])
    return array * unpack(packed["scales"]) if "scales" in packed else array
