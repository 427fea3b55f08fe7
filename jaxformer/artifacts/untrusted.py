r"""Checks that protect against a malicious tokenizer.json.

A tokenizer.json may contain steps that lengthen a text, or regular expressions that take very long.
`read_backend` rejects a file if encoding a text with it could need excessive time or memory.
`guarded` converts a panic of the `tokenizers` library, which is written in Rust, into a ValueError
with a one-line message.

The `tokenizers` library matches regular expressions by backtracking. A pattern of one character
class, such as `\s+`, never backtracks. Two limits apply to each pattern that may backtrack:

- `backtracking_patterns` rejects a pattern that takes cubic or exponential time on any test text,
  or quadratic time on an ordinary text. The function measures the time of the pattern on repeated
  characters, and on repeated strings that are derived from the pattern.
- `in_pieces` splits a long text, so that patterns are matched on at most 8,192 characters. A split
  is accepted only if it does not change the tokens near the split.
"""

import gc
import json
import math
import os
import re
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from jaxformer.artifacts.files import read_text
from jaxformer.terminal import kind_of

MOST_BYTES = 64 * 2**20
# The steps of a tokenizer may lengthen a text by a factor of at most 2^8.
_MOST_GROWTH = 8.0
# The largest accepted `max_input_chars_per_word`. WordPiece takes cubic time in this number.
_MOST_INPUT = 500
_LONGEST_AFFIX = 64
# Types of normalizers that insert text, each with the option that contains the text.
_INSERTED = {"Replace": "content", "Prepend": "prepend"}

LONGEST_PATTERN = 2000
LONGEST_PIECE = 8192
# To test a split of a text, at least `_CONTEXT` characters before the split are encoded twice, each
# time with a different number of characters after the split (`_AFTER`). Both times, the tokens
# before the split must be the same.
_CONTEXT = 240
_AFTER = (_CONTEXT - 1, _CONTEXT // 2)
# To test a pattern, strings are repeated `_EXPONENTIAL` or `_CUBIC` times. A pattern that
# takes exponential time runs for minutes on a string of `_EXPONENTIAL` repetitions. On a string of
# `_CUBIC` repetitions, a pattern runs for 0.5 to 2 s in cubic time, and for 1 to 30 ms in quadratic
# time.
_EXPONENTIAL, _CUBIC = 48, 1024
_SECONDS = 0.25
_CHARACTERS = ("a", "A", "漢", "0", " ", "\n", ".", "_", "'")
_MIXED = "The tide, at 12.30 \n" * 400
# The test of a pattern derives at most this number of strings from the pattern.
_MOST_UNITS = 64
# At these positions a split rarely changes tokens: before a line, after a word, before a word.
_PLACES = [re.compile(x) for x in (r"(?<=\n)(?=\S)", r"(?<=\S)(?=\s)", r"(?<=\s)(?=\S)")]

_CLASS = r"\[\^?(?:\\.|\[:\^?\w+:\]|[^\[\]\\])+\]"
_TERM = rf"(?:{_CLASS}|\\[pP]\{{\^?\w+\}}|\\?.)(?:[+*?]|\{{\d{{1,2}}(?:,\d*)?\}})?"
# Alternatives that are a single character or class, possibly repeated, never backtrack.
_SIMPLE = re.compile(rf"(?:{_TERM})(?:\|{_TERM})*", re.DOTALL)
_ATOM = re.compile(
    rf"(?P<open>\((?:\?(?:[imx-]*:|(?P<look><?[=!])|>|<\w+>))?)|(?P<close>\))|(?P<bar>\|)"
    rf"|\{{(?P<least>\d*),?\d*\}}|(?P<quantifier>[+*?])|{_CLASS}|\\[pP]\{{\^?\w+\}}|\\?.",
    re.DOTALL,
)

_lock = threading.Lock()
_silenced: dict[str, Any] = {"depth": 0}

Item = TypeVar("Item")
Result = TypeVar("Result")


# ---- panics of the library


def guarded(
    call: Callable[[], Result], *, silent: bool = False, cause: str = "a pattern of the tokenizer"
) -> Result:
    """Runs `call` and converts errors of the `tokenizers` library into a one-line ValueError.

    The errors are Rust panics and exceptions.

    Args:
        call: Function without arguments that uses the library.
        silent: Whether to suppress the message that a panic prints on the terminal.
        cause: If the library gives up on a text, the message contains "`cause` takes too long on
            this text".
    """
    try:
        with panics_silenced() if silent else nullcontext():
            return call()
    except (KeyboardInterrupt, SystemExit, OSError, ValueError, TypeError, MemoryError):
        raise
    except BaseException as error:  # PanicException of pyo3 is not a subclass of Exception.
        reason = " ".join(str(error).split())[:200]
        hint = f"; {cause} takes too long on this text" if "retry-limit" in reason else ""
        raise ValueError(f"the tokenizers library failed: {reason}{hint}") from None


@contextmanager
def panics_silenced() -> Generator[None]:
    """Suppresses the messages that panics of the `tokenizers` library print on the terminal.

    The library prints a backtrace to file descriptor 2 before it raises the exception. Inside this
    context, file descriptor 2 refers to a temporary file. At the end, the output before the first
    panic is copied from this file to the terminal. Several threads may use the context
    concurrently.
    """
    with _lock:
        _silenced["depth"] += 1
        if _silenced["depth"] == 1:
            sys.stderr.flush()
            _silenced["stderr"] = os.dup(2)
            _silenced["file"] = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
            os.dup2(_silenced["file"].fileno(), 2)
    try:
        yield
    finally:
        with _lock:
            _silenced["depth"] -= 1
            if _silenced["depth"] == 0:
                sys.stderr.flush()
                os.dup2(_silenced["stderr"], 2)
                os.close(_silenced["stderr"])
                with _silenced["file"] as file:
                    file.seek(0)
                    os.write(2, file.read().partition(b"\nthread '")[0])


# ---- reading a file


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json. Call this through `guarded`, which shortens errors to one line.

    Raises:
        ValueError: The file is too large or damaged, or encoding a text could need excessive time
            or memory. The message is one line without the path.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size} bytes; the file may have at most {MOST_BYTES} bytes")
    text = read_text(path)
    _check_parts(json.loads(text))
    return tokenizers.Tokenizer.from_str(text)


def _check_parts(content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"it contains {kind_of(content)}; it must contain an object")
    if _growth(content) > _MOST_GROWTH:
        raise ValueError(
            "its Replace and Prepend steps could lengthen a text by a factor of more than 256"
        )
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
    """Returns log₂ of the factor by which the Replace and Prepend steps may lengthen a text."""
    texts = (x.get(_INSERTED.get(str(x.get("type")), ""), "") for x in _objects(parts))
    return sum(math.log2(max(1, len(str(text)))) for text in texts)


def _objects(parts: Any) -> Iterator[dict[str, Any]]:
    """Yields all nested objects of a tokenizer.json, except its vocabulary and merges."""
    if isinstance(parts, dict):
        yield parts
        parts = [part for name, part in parts.items() if name not in ("vocab", "merges")]
    for part in parts if isinstance(parts, list) else ():
        yield from _objects(part)


# ---- patterns that take too long


def backtracking_patterns(parts: dict[str, Any]) -> tuple[str, ...]:
    """Returns the patterns of a tokenizer.json that may backtrack.

    Args:
        parts: The parsed "normalizer", "pre_tokenizer" and "decoder".

    Raises:
        ValueError: a pattern takes too long on a test text, or the decoder has a pattern that may
            backtrack. Such a pattern is rejected because the input of a decoder cannot be split.
    """
    for pattern in _patterns(parts.get("decoder")):
        raise ValueError(
            f"its decoder has the pattern {pattern[:80]!r}; a decoder may have only patterns of "
            r"one character class, such as '\s+'"
        )
    patterns = tuple(_patterns([parts.get("normalizer"), parts.get("pre_tokenizer")]))
    for pattern in patterns:
        _try_out(pattern)
    return patterns


def _patterns(part: Any) -> list[str]:
    """Returns all patterns in a part of a tokenizer.json, except patterns that never backtrack."""
    found = (x.get("Regex") for x in _objects(part))
    return [x for x in found if isinstance(x, str) and not is_simple(x)]


def is_simple(pattern: str) -> bool:
    r"""Returns whether each alternative of a pattern is one character class, such as `\s+`."""
    return len(pattern) <= LONGEST_PATTERN and _SIMPLE.fullmatch(pattern) is not None


@lru_cache(maxsize=64)
def _try_out(pattern: str) -> None:
    """Raises ValueError if a pattern takes too long on one of several test texts."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(
            f"its pattern {pattern[:80]!r} … has {len(pattern)} characters; at most "
            f"{LONGEST_PATTERN} are accepted"
        )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = [x for x in re.sub(r"\\.", "", pattern) if x.isalpha() or not x.isascii()]
    characters = list(dict.fromkeys((*_CHARACTERS, *letters[:16])))
    pairs = [a + b for a in characters[:5] for b in (*characters[:8], "b") if a != b]
    units = list(dict.fromkeys((*characters, *_units(pattern))))
    # Some patterns backtrack only if the match fails at the end of the text.
    tails = ("", "!x", f"\x01{string.printable}{pattern}")
    trials = [(unit * _EXPONENTIAL, "exponential time") for unit in (*units, *pairs)]
    trials += [(unit * _CUBIC, "cubic time") for unit in units]
    trials += [(_MIXED, "quadratic time for every text")]
    with panics_silenced():
        for text, how_much in trials:
            if any(_seconds(split, text + tail) > _SECONDS for tail in tails):
                raise ValueError(f"its pattern {pattern[:80]!r} needs {how_much}")


def _units(pattern: str) -> list[str]:
    """Returns one matching string for each alternative of each group of a pattern.

    Each string also contains matches of the optional parts of its alternative. The strings serve
    only to make the pattern backtrack, so not every string has to match.
    """
    # Each open group of the pattern is a list of alternatives, and each alternative is a list of
    # atoms.
    groups: list[list[list[str]]] = [[[]]]
    # For each open group, `is_look` says whether the group is a look-around.
    is_look: list[bool] = []
    units: list[str] = []
    for atom in _ATOM.finditer(pattern):
        branch = groups[-1][-1]
        if atom["open"]:
            groups.append([[]])
            is_look.append(atom["look"] is not None)
        elif atom["bar"]:
            groups[-1].append([])
        elif atom["close"] and len(groups) > 1:
            texts = ["".join(x) for x in groups.pop()]
            units += texts
            groups[-1][-1].append("" if is_look.pop() else next(filter(None, texts), ""))
        elif atom["least"] is not None and branch:
            branch[-1] *= min(max(int(atom["least"] or 1), 1), 16)
        elif not atom["quantifier"]:
            branch.append(_example(atom[0], pattern))
    units += ["".join(x) for group in groups for x in group]
    return [unit[: LONGEST_PIECE // _CUBIC] for unit in dict.fromkeys(units) if unit][:_MOST_UNITS]


def _example(atom: str, pattern: str) -> str:
    """Returns a character that an atom of a pattern matches, or "" for an atom such as `^`."""
    if len(atom) == 1 and atom not in "^$.":
        return atom
    try:
        removes = normalizers.Replace(Regex(atom), "")
    except Exception:  # `atom` is valid only within a longer pattern.
        return ""
    candidates = (*atom, *_CHARACTERS, *string.printable, *pattern)
    return next((x for x in candidates if removes.normalize_str(x) == ""), "")


def _seconds(split: pre_tokenizers.PreTokenizer, text: str) -> float:
    """Returns the processor time of a pattern on a text, or infinity if the library gives up.

    Other processes can only increase the time, so a long time is measured again.
    """
    collects = gc.isenabled()
    gc.disable()  # A garbage collection may take longer than the timed match.
    shortest = math.inf
    try:
        for _ in range(2):
            begin = time.thread_time()
            split.pre_tokenize_str(text)
            shortest = min(shortest, time.thread_time() - begin)
            if shortest <= _SECONDS:
                break
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # PanicException of pyo3 is not a subclass of Exception.
        return math.inf
    finally:
        if collects:
            gc.enable()
    return shortest


# ---- long texts


def in_pieces(
    apply: Callable[[str], Sequence[Item]], text: str
) -> Iterator[tuple[int, Sequence[Item]]]:
    """Applies a function to pieces of a text with at most `LONGEST_PIECE` characters each.

    Args:
        apply: Function that returns the tokens of a text, or its normalized characters.
        text: The text.

    Yields:
        (the position of a piece in the text, the result of `apply` for it). The concatenated
        results equal `apply(text)`.

    Raises:
        ValueError: Every possible split of a piece would change the result of `apply`.
    """
    begin = 0
    while len(text) - begin > LONGEST_PIECE:
        piece = text[begin : begin + LONGEST_PIECE]
        whole = apply(piece)
        place, length = _division(apply, piece, whole)
        if not place:
            raise ValueError(
                "the text is too long for a pattern of the tokenizer and must be split, but every "
                f"split between the characters {begin} and {begin + LONGEST_PIECE} would change "
                "the tokens; insert a line break between these characters"
            )
        yield begin, whole[:length]
        begin += place
    yield begin, apply(text[begin:])


def _division(apply: Callable[[str], Sequence], piece: str, whole: Sequence) -> tuple[int, int]:
    """Finds a position at which splitting a piece does not change the tokens.

    The tokens after the position must not depend on the text before the position. The tokens just
    before the position must stay the same if fewer characters follow the position.

    Args:
        apply: See `in_pieces`.
        piece: The piece.
        whole: The tokens of the piece, `apply(piece)`.

    Returns:
        (the position, the number of tokens before it), or (0, 0) if there is no such position.
    """

    @cache
    def length_before(place: int) -> int | None:
        after = apply(piece[place:])
        length = len(whole) - len(after)
        return length if length >= 0 and whole[length:] == after else None

    for place in _places(piece, len(piece) // 2, len(piece) - _CONTEXT):
        length = length_before(place)
        if length is None:
            continue
        starts = _places(piece, place - 2 * _CONTEXT, place - _CONTEXT)
        start = next((x for x in starts if length_before(x) is not None), None)
        if start is None:
            continue
        near = whole[length_before(start) : length]
        if all(apply(piece[start : place + more])[: len(near)] == near for more in _AFTER):
            return place, length
    return 0, 0


def _places(piece: str, first: int, last: int) -> Iterator[int]:
    """Yields candidate positions from `first` to `last` for splitting a piece.

    The function yields the last four starts of lines, then the last four ends of words, then the
    last four starts of words. Finally, the function yields up to 128 arbitrary positions, in
    descending order from `last`.
    """
    for pattern in _PLACES:
        yield from [x.start() for x in pattern.finditer(piece, first, last)][:-5:-1]
    yield from range(last, max(first, last - 128), -1)
