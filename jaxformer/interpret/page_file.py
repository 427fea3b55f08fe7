"""Writes the page: packs arrays, embeds the data and joins the modules of `page/`.

The page does not need a build step. A packed array is a JSON object with "type", "shape" and "data"
and, for "int8", "scales" and "axis". "data" is base64 of compressed 8-bit, 16-bit or 32-bit
numbers. `page/arrays.js` unpacks arrays.
"""

import base64
import hashlib
import html
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Num, UInt8

from jaxformer.artifacts.files import json_text, without_surrogates

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class|let)\b)", re.MULTILINE)
_FOLDER = files("jaxformer.interpret") / "page"


def page_html(data: dict, title: str) -> str:
    """Returns the HTML of a page.

    The content security policy allows only the page's own script and style sheet (by hash) and
    forbids network connections. `<` is escaped in the data, so that a text cannot close the script
    element.

    Args:
        data: The JSON that the script reads.
        title: The title of the document.
    """
    script, style = f"\n{joined_script()}", f"\n{asset('page.css')}"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(without_surrogates(title)),
        "style": style,
        "data": embedded_json(data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embedded_json(data: dict) -> str:
    r"""Returns JSON for a script element, in which `<`, `>` and `&` are escaped, as in `\u003c`."""
    text = json_text(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def joined_script() -> str:
    """Joins all JavaScript modules of `page/` into one script.

    Each module comes after the modules that it imports. All JavaScript modules share one scope, so
    each top-level name may occur in only one module. An import must have the form `import { a, b }
    from "./module.js";`.
    """
    order: list[str] = []

    def add(name: str) -> None:
        if name not in order:
            for imported in _IMPORT.findall(asset(name)):
                add(imported)
            order.append(name)

    add("main.js")
    modules = [_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in order]
    body = "\n".join(f"// {name}\n{text}" for name, text in zip(order, modules, strict=True))
    return f'(() => {{\n"use strict";\n{body}}})();\n'


def asset(name: str) -> str:
    """Returns the text of a file of `page/`."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def pack(array: Num[Array | np.ndarray, "*shape"], kind: str) -> dict[str, Any]:
    """Packs an array into a JSON object.

    Args:
        array: The array.
        kind: The dtype of the stored numbers: "uint8", "int32", "float16" or "float32".
    """
    stored = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
    data = base64.b64encode(zlib.compress(stored.tobytes(), 6)).decode()
    return {"type": kind, "shape": list(stored.shape), "data": data}


def pack_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Packs texts. Each text ends with the byte 255, which UTF-8 never contains."""
    joined = b"".join(text.encode() + b"\xff" for text in texts)
    return pack(np.frombuffer(joined, np.uint8), "uint8")


def pack_int8(array: Float[np.ndarray, "*shape"], axis: int) -> dict[str, Any]:
    """Packs a matrix as 8-bit integers with one scale for each slice along `axis`."""
    codes, scales = quantize(array, axis)
    return {**pack(codes, "int8"), "scales": pack(scales, "float32"), "axis": axis % array.ndim}


def quantize(
    array: Float[np.ndarray, "*shape"], axis: int
) -> tuple[Num[np.ndarray, "*shape"], Float[np.ndarray, "..."]]:
    """Quantizes an array to integers in −127 … 127 with one scale per slice.

    Args:
        array: The array.
        axis: The axis along which entries share a scale; for kernels, the input axis.

    Returns:
        The integers, and the scales with size 1 along `axis`. The error of an entry is at most
        half a scale.
    """
    scales = (np.abs(array).max(axis=axis, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(array / np.where(scales == 0, 1, scales))
    return np.clip(codes, -127, 127).astype(np.int8), scales


def pack_attention_weights(weights: Float[np.ndarray, "*batch keys"]) -> dict[str, Any]:
    """Packs attention weights as 8-bit integers, relative to the largest weight of each row.

    The page's script divides each row of integers by the sum of the row, so that the weights sum to
    1 again.
    """
    return pack(quantize_rows(weights), "uint8")


def quantize_rows(rows: Float[np.ndarray, "*batch keys"]) -> UInt8[np.ndarray, "*batch keys"]:
    """Quantizes each row to integers 0 … 255, where 255 stands for the row's largest entry."""
    largest = rows.max(axis=-1, keepdims=True)
    return np.rint(255 * rows / np.where(largest == 0, 1, largest)).astype(np.uint8)


def unpack(packed: dict[str, Any]) -> Num[np.ndarray, "*shape"]:
    """Unpacks an array that `pack` or `pack_int8` packed."""
    stored = zlib.decompress(base64.b64decode(packed["data"]))
    array = np.frombuffer(stored, np.dtype(packed["type"]).newbyteorder("<"))
    array = array.reshape(packed["shape"])
    return array * unpack(packed["scales"]) if "scales" in packed else array
