r"""Guarded access to the `tokenizers` library, for files that somebody else wrote.

A tokenizer.json decides how long a normalized text gets and how long encoding takes.
`read_backend` refuses a file that could take time or memory out of proportion to the text.
`guarded` turns errors of the library into ValueError.

The library matches patterns by backtracking. Each pattern is timed on short runs of characters when
its file is read.

- A pattern that takes time exponential in the length of a text is refused.
- A pattern that takes quadratic time on runs of one kind of character is applied to bounded pieces
  of a text. SuperBPE's `(?=(\d{3})+(?!\d))` does so on digits.
"""

import gc
import itertools
import json
import math
import os
import re
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, pre_tokenizers

from jaxformer.artifacts.files import read_text

MOST_BYTES = 64 * 2**20
_MOST_GROWTH = 8.0  # doublings of a text's length
_MOST_INPUT = 500  # characters of a word; WordPiece's time grows with its cube
_LONGEST_AFFIX = 64
# Type of a normalizer: the option with the text that it inserts.
_INSERTED = {"Replace": "content", "Prepend": "prepend"}
LONGEST_PATTERN = 2000
_EXPONENTIAL, _QUADRATIC = 48, 8192  # characters of the runs on which patterns are timed
# Seconds. Linear patterns take 1 to 10 ms, quadratic ones 50 to 1,300 ms.
_SUSPICIOUS, _CLEAR = 0.01, 0.2
_GROWTH = 3  # time ratio for twice the run: 2 for linear patterns, 4 for quadratic ones
_CHARACTERS = ("a", "A", "漢", "0", " ", "\n", ".", "_", "'")
_MIXED = "The tide, at 12.30 \n"
# One character or class, possibly repeated: there is no backtracking.
_SIMPLE = re.compile(r"(\\?.|\\[pP]\{\w+\}|\[[^\[\]]*\])([+*?]|\{\d+,?\d*\})?", re.DOTALL)
# Longest runs for a pattern of quadratic time: of one kind of character, and of any non-spaces.
_LONGEST_RUNS = {r"[^\W\d_]": 1024, r"\d": 1024, r"\s": 1024, r"[^\w\s]|_": 1024, r"\S": 8192}
_RUNS = {re.compile(f"(?:{x}){{{n + 1},}}+"): n for x, n in _LONGEST_RUNS.items()}
_lock = threading.Lock()
_silenced: dict[str, Any] = {"depth": 0}

Result = TypeVar("Result")


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


def guarded(call: Callable[[], Result], *, silent: bool = False) -> Result:
    """Runs `call` and turns the library's panics and bare exceptions into a one-line ValueError.

    Args:
      call: Function without arguments that uses the library.
      silent: Whether to hide the message that a panic prints on the terminal.
    """
    try:
        with panics_silenced() if silent else nullcontext():
            return call()
    except (KeyboardInterrupt, SystemExit, OSError, ValueError, TypeError, MemoryError):
        raise
    except BaseException as error:  # pyo3's PanicException is no Exception
        reason = " ".join(str(error).split())[:200]
        hint = "; its pattern takes too long on this text" if "retry-limit" in reason else ""
        raise ValueError(f"the tokenizers library failed: {reason}{hint}") from None


def parts_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns the parsed content of the tokenizer.json that `backend` would write."""
    return json.loads(backend.to_str())


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
    is_quadratic(content)


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


def is_quadratic(parts: Any) -> bool:
    """Returns whether a pattern takes quadratic time on runs of one kind of character.

    Raises:
      ValueError: If a pattern is too long, or takes exponential time, or quadratic time on mixed
        text.
    """
    patterns = (x.get("Regex") for x in _objects(parts))
    return any([_try_out(pattern) for pattern in patterns if isinstance(pattern, str)])


@lru_cache(maxsize=64)
def _try_out(pattern: str) -> bool:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(
            f"its pattern {pattern[:80]!r} … has {len(pattern)} characters; at most "
            f"{LONGEST_PATTERN} are accepted"
        )
    if _SIMPLE.fullmatch(pattern):
        return False
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = [x for x in re.sub(r"\\.", "", pattern) if x.isalpha() or not x.isascii()]
    characters = list(dict.fromkeys((*_CHARACTERS, *letters[:16])))
    tails = ("", "!x", f"\x01{string.printable}{pattern}")  # some need a character to fail late
    pairs = [a + b for a in characters[:5] for b in (*characters[:8], "b") if a != b]
    with panics_silenced():
        for run in (*characters, *pairs):
            for tail in tails:
                if _seconds(split, run * (_EXPONENTIAL // len(run)) + tail) == math.inf:
                    raise ValueError(f"its pattern {pattern[:80]!r} takes exponential time")
        if _grows(split, _MIXED, ""):
            raise ValueError(f"its pattern {pattern[:80]!r} takes quadratic time on any text")
        return any(_grows(split, run, tail) for run in characters for tail in tails)


def _grows(split: pre_tokenizers.PreTokenizer, run: str, tail: str) -> bool:
    """Returns whether a pattern takes more than linear time on repetitions of `run`."""
    length = _QUADRATIC // len(run)
    for _ in range(2):  # use the lower time: other processes can only increase it
        short = _seconds(split, run * length + tail)
        if short < _SUSPICIOUS or short >= _CLEAR:
            return short >= _CLEAR
    long = [_seconds(split, run * (2 * length) + tail) for _ in range(2)]
    return math.inf in long or min(long) > _GROWTH * short


def _seconds(split: pre_tokenizers.PreTokenizer, text: str) -> float:
    """Returns the processor time of a pattern on a text, or infinity if the library gives up."""
    collects = gc.isenabled()
    gc.disable()  # garbage collection may take longer than the pattern
    begin = time.thread_time()
    try:
        split.pre_tokenize_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # pyo3's PanicException is no Exception
        return math.inf
    else:
        return time.thread_time() - begin
    finally:
        if collects:
            gc.enable()


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


def bounded_pieces(text: str) -> list[str]:
    """Divides a text where a run is too long for a pattern of quadratic time.

    A run of letters, digits, spaces or other characters is divided after every 1,024 of them, a
    word of several kinds after every 8,192 characters. The tokens at such a place may differ from
    those of the whole text. A text without such runs is returned as one piece.
    """
    cuts = {0, len(text)}
    for pattern, limit in _RUNS.items():
        for run in pattern.finditer(text) if len(text) > limit else ():
            cuts.update(range(run.start() + limit, run.end(), limit))
    return [text[a:b] for a, b in itertools.pairwise(sorted(cuts))] or [text]
