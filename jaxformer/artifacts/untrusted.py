r"""Guards for a tokenizer.json that somebody else wrote.

It decides how long a normalized text gets and how long encoding takes. `read_backend` refuses a
file that could take time or memory out of proportion to the text. `guarded` makes a one-line error
of a panic of the `tokenizers` library, which is written in Rust.

The library matches a pattern (`Regex`) by backtracking. A pattern of one character class, such as
`\s+`, never backtracks. For all other patterns there are two bounds:

- `backtracking_patterns` refuses a pattern that takes more than quadratic time, or quadratic time
  on plain text. It times the pattern on repetitions of characters and of strings that are made
  from the pattern.
- `in_pieces` divides a long text, so that no pattern sees more than 8,192 characters at once. It
  divides only where a window of the text gets the same result with and without the division.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from jaxformer.artifacts.files import read_text

MOST_BYTES = 64 * 2**20
_MOST_GROWTH = 8.0  # doublings of a text's length
_MOST_INPUT = 500  # characters of a word; WordPiece's time grows with its cube
_LONGEST_AFFIX = 64
# Type of a normalizer: the option with the text that it inserts.
_INSERTED = {"Replace": "content", "Prepend": "prepend"}

LONGEST_PATTERN = 2000
LONGEST_PIECE = 8192  # characters
# A place where a text is divided is tried with at least this many characters on each side. The
# tokens before it must be the same with each of the two numbers of characters after it.
_CONTEXT = 240
_AFTER = (_CONTEXT - 1, _CONTEXT // 2)
# Repetitions of a string. A pattern of exponential time takes minutes for the first number, one of
# cubic time 0.5 to 2 s for the second. Patterns of quadratic time take 1 to 30 ms.
_EXPONENTIAL, _CUBIC = 48, 1024
_SECONDS = 0.25
_CHARACTERS = ("a", "A", "漢", "0", " ", "\n", ".", "_", "'")
_MIXED = "The tide, at 12.30 \n" * 400
_MOST_UNITS = 64  # strings of a pattern that are repeated
# Places where tokens seldom depend on each other: before a line, after a word, before a word.
_PLACES = [re.compile(x) for x in (r"(?<=\n)(?=\S)", r"(?<=\S)(?=\s)", r"(?<=\s)(?=\S)")]

_CLASS = r"\[\^?(?:\\.|\[:\^?\w+:\]|[^\[\]\\])+\]"
_TERM = rf"(?:{_CLASS}|\\[pP]\{{\^?\w+\}}|\\?.)(?:[+*?]|\{{\d{{1,2}}(?:,\d*)?\}})?"
# Alternatives of one character or class, possibly repeated: these never backtrack.
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
    """Runs `call` and turns the library's panics and bare exceptions into a one-line ValueError.

    Args:
      call: Function without arguments that uses the library.
      silent: Whether to hide the message that a panic prints on the terminal.
      cause: The part that the error names if the library reaches its limit of time for a text.
    """
    try:
        with panics_silenced() if silent else nullcontext():
            return call()
    except (KeyboardInterrupt, SystemExit, OSError, ValueError, TypeError, MemoryError):
        raise
    except BaseException as error:  # pyo3's PanicException is no Exception
        reason = " ".join(str(error).split())[:200]
        hint = f"; {cause} takes too long on this text" if "retry-limit" in reason else ""
        raise ValueError(f"the tokenizers library failed: {reason}{hint}") from None


@contextmanager
def panics_silenced() -> Iterator[None]:
    """Hides the messages that the library's panics print on the terminal.

    The library, written in Rust, prints a backtrace to file descriptor 2 before Python sees the
    exception. Inside this context a temporary file replaces that descriptor. At the end, the file's
    content up to the first panic is written to the terminal. Several threads may be inside.
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


# ---- patterns that take too long


def backtracking_patterns(parts: dict[str, Any]) -> tuple[str, ...]:
    """Returns the patterns of a tokenizer.json that may backtrack.

    Args:
      parts: The parsed "normalizer", "pre_tokenizer" and "decoder".

    Raises:
      ValueError: If a pattern takes too much time on a text of some kind, or if a decoder has a
        pattern that may backtrack: the text of a decoder cannot be divided.
    """
    for pattern in _patterns(parts.get("decoder")):
        raise ValueError(
            f"its decoder has the pattern {pattern[:80]!r}; a decoder may only have patterns of "
            r"one character class, such as '\s+'"
        )
    patterns = tuple(_patterns([parts.get("normalizer"), parts.get("pre_tokenizer")]))
    for pattern in patterns:
        _try_out(pattern)
    return patterns


def _patterns(part: Any) -> list[str]:
    """Returns the patterns of a part, except those that never backtrack."""
    found = (x.get("Regex") for x in _objects(part))
    return [x for x in found if isinstance(x, str) and not is_simple(x)]


def is_simple(pattern: str) -> bool:
    r"""Returns whether each alternative of a pattern is one character class, such as `\s+`."""
    return len(pattern) <= LONGEST_PATTERN and _SIMPLE.fullmatch(pattern) is not None


@lru_cache(maxsize=64)
def _try_out(pattern: str) -> None:
    """Raises ValueError if a pattern takes too much time on a text of some kind."""
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
    tails = ("", "!x", f"\x01{string.printable}{pattern}")  # some need a character to fail late
    trials = [(unit * _EXPONENTIAL, "exponential time") for unit in (*units, *pairs)]
    trials += [(unit * _CUBIC, "cubic time") for unit in units]
    trials += [(_MIXED, "quadratic time on any text")]
    with panics_silenced():
        for text, how_much in trials:
            if any(_seconds(split, text + tail) > _SECONDS for tail in tails):
                raise ValueError(f"its pattern {pattern[:80]!r} takes {how_much}")


def _units(pattern: str) -> list[str]:
    """Returns strings that groups of a pattern match, one for each alternative of each group.

    Optional parts are included. These strings need not be exact: they only have to make the
    pattern backtrack when they are repeated.
    """
    groups: list[list[list[str]]] = [[[]]]  # open groups, their alternatives, and their atoms
    is_look: list[bool] = []  # whether each open group matches no characters of its own
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
    """Returns a character that an atom of a pattern matches; "" if it matches none, like `^`."""
    if len(atom) == 1 and atom not in "^$.":
        return atom
    try:
        removes = normalizers.Replace(Regex(atom), "")
    except Exception:  # an atom that is no pattern by itself
        return ""
    candidates = (*atom, *_CHARACTERS, *string.printable, *pattern)
    return next((x for x in candidates if removes.normalize_str(x) == ""), "")


def _seconds(split: pre_tokenizers.PreTokenizer, text: str) -> float:
    """Returns the processor time of a pattern on a text, or infinity if the library gives up.

    Other processes can only increase the time, so a long time is measured again.
    """
    collects = gc.isenabled()
    gc.disable()  # garbage collection may take longer than the pattern
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
    except BaseException:  # pyo3's PanicException is no Exception
        return math.inf
    finally:
        if collects:
            gc.enable()
    return shortest


# ---- long texts


def in_pieces(apply: Callable[[str], Sequence[Item]], text: str) -> Iterator[Sequence[Item]]:
    """Applies a function to a text, at most `LONGEST_PIECE` characters at once.

    Args:
      apply: Returns the tokens of a text, or its normalized characters.
      text: The text.

    Yields:
      The result for each piece. All together are the result for the whole text.

    Raises:
      ValueError: If a piece has no place at which its division keeps the result.
    """
    begin = 0
    while len(text) - begin > LONGEST_PIECE:
        piece = text[begin : begin + LONGEST_PIECE]
        whole = apply(piece)
        place, length = _division(apply, piece, whole)
        if not place:
            raise ValueError(
                f"text is too long for a pattern of the tokenizer, and the {LONGEST_PIECE} "
                f"characters from character {begin} on cannot be encoded in two parts without "
                "changing their tokens; insert a line break there"
            )
        yield whole[:length]
        begin += place
    yield apply(text[begin:])


def _division(apply: Callable[[str], Sequence], piece: str, whole: Sequence) -> tuple[int, int]:
    """Returns where a piece may be divided, and the length of the result before; (0, 0): nowhere.

    The result after the place must be the same without the text before it. The result of a window
    before the place must be the same for any number of characters after it.

    Args:
      apply: See `in_pieces`.
      piece: The piece.
      whole: The result for the whole piece.
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
    """Yields places from `first` to `last` where a piece may be divided.

    These are the last starts of a line, ends of a word and starts of a word, and then any of the
    last places.
    """
    for pattern in _PLACES:
        yield from [x.start() for x in pattern.finditer(piece, first, last)][:-5:-1]
    yield from range(last, max(first, last - 128), -1)
