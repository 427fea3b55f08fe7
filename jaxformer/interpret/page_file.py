"""Writes the page: packs arrays, embeds the data and joins the modules of `page/`.

There is no build step. Arrays are base64 of compressed bytes, with 8-bit or 16-bit rounding: a
packed array is {"type", "shape", "data"} and, for "int8", "scales" and "axis". `page/arrays.js`
reads it.
"""

import base64
import hashlib
import html
import re
import zlib
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

    Its content security policy allows one script and one style sheet, by their hashes, and no
    connection. `<` is escaped in the data, so no text can end the element that holds it.

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
    r"""Returns JSON for a script element, with `<`, `>` and `&` as `\u003c` and so on."""
    text = json_text(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def joined_script() -> str:
    """Returns all modules as one script, each after the modules that it imports.

    The modules share one scope, so their top-level names must differ. An import must be of the form
    `import { a, b } from "./module.js";`.
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
    """Returns an array as a JSON object.

    Args:
        array: The array.
        kind: The type of the stored numbers: "uint8", "int32", "float16" or "float32".
    """
    stored = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
    data = base64.b64encode(zlib.compress(stored.tobytes(), 6)).decode()
    return {"type": kind, "shape": list(stored.shape), "data": data}


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


def unpack(packed: dict[str, Any]) -> Num[np.ndarray, "*shape"]:
    """Returns the array of `pack` or `pack_int8`."""
    stored = zlib.decompress(base64.b64decode(packed["data"]))
    array = np.frombuffer(stored, np.dtype(packed["type"]).newbyteorder("<"))
    array = array.reshape(packed["shape"])
    return array * unpack(packed["scales"]) if "scales" in packed else array
