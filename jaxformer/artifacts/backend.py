"""Guarded access to the `tokenizers` library, for files that somebody else wrote.

A tokenizer.json decides how long a normalized text gets and how long encoding takes.
`read_backend` refuses a file that could take time or memory out of proportion to the text.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from jaxformer.artifacts.files import read_text
from jaxformer.artifacts.patterns import backtracking_patterns

MOST_BYTES = 64 * 2**20
_MOST_GROWTH = 8.0  # doublings of a text's length
_MOST_INPUT = 500  # characters of a word; WordPiece's time grows with its cube
_LONGEST_AFFIX = 64
# Type of a normalizer: the option with the text that it inserts.
_INSERTED = {"Replace": "content", "Prepend": "prepend"}
_OF_TOKEN = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_OF_BPE = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json. Call it through `guarded`, which shortens errors to one line.

    Raises:
      ValueError: If the file is too large, damaged, or would take time or memory out of proportion
        to a text. The message is one line without the path.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size} bytes; at most {MOST_BYTES} are read")
    text = read_text(path)
    _check_parts(json.loads(text))
    return tokenizers.Tokenizer.from_str(text)


def tokenizer_parts(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns the parsed tokenizer.json that `backend` would write, without vocabulary and merges.

    Serializing and parsing 500,000 merges would take longer than reading the file.
    """
    small = tokenizers.Tokenizer(tokenizers.models.BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(small, name, part)
    if backend.truncation is not None:
        small.enable_truncation(**backend.truncation)
    if backend.padding is not None:
        small.enable_padding(**backend.padding)
    added = sorted(backend.get_added_tokens_decoder().items())
    entries = [{"id": n} | {x: getattr(token, x) for x in _OF_TOKEN} for n, token in added]
    model = _model_options(backend.model)
    return json.loads(small.to_str()) | {"added_tokens": entries, "model": model}


def _model_options(model: tokenizers.models.Model) -> dict[str, Any]:
    if isinstance(model, tokenizers.models.BPE):
        return {"type": "BPE"} | {name: getattr(model, name) for name in _OF_BPE}
    content = json.loads(model.__getstate__())  # only BPE has merges
    return {name: value for name, value in content.items() if name != "vocab"}


def check_unicode(texts: Iterable[str]) -> None:
    """Raises ValueError for a text with a lone surrogate, which UTF-8 cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: it cannot be encoded as UTF-8: {error}") from None


def _check_parts(content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}; it must be an object")
    if _growth(content) > _MOST_GROWTH:
        raise ValueError("its Replace and Prepend steps could make a text over 256 times longer")
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > _LONGEST_AFFIX:
            raise ValueError(f"its {name} has more than {_LONGEST_AFFIX} characters")
    name = "max_input_chars_per_word"
    longest = model.get(name, 0)
    if not isinstance(longest, int) or longest > _MOST_INPUT:
        raise ValueError(f"its {name} is {longest!r}; it must be at most {_MOST_INPUT}")
    backtracking_patterns(content)


def _growth(parts: Any) -> float:
    """Returns log₂ of the factor by which all insertions together may lengthen a text."""
    texts = (x.get(_INSERTED.get(str(x.get("type")), ""), "") for x in _objects(parts))
    return sum(math.log2(max(1, len(str(text)))) for text in texts)


def _objects(parts: Any) -> Iterator[dict[str, Any]]:
    """Yields the objects in the parts of a tokenizer.json, except its vocabulary and merges."""
    if isinstance(parts, dict):
        yield parts
        parts = [part for name, part in parts.items() if name not in ("vocab", "merges")]
    for part in parts if isinstance(parts, list) else ():
        yield from _objects(part)
