"""Text output to a terminal.

Names, keys and tokens may come from untrusted files. A terminal would execute escape sequences in
such texts, so the command line passes every message through `visible`.
"""

import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TextIO

# The pattern matches C0 controls except tab and line feed, DEL, C1 controls, and characters that
# reverse the order of a line. It also matches lone surrogates, which UTF-8 cannot encode.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def did_you_mean(word: str, accepted: Iterable[str]) -> str:
    """Returns "; did you mean …?" with the accepted word closest to `word`, or ""."""
    close = get_close_matches(word, list(accepted), n=1, cutoff=0.76)
    return f"; did you mean {close[0]}?" if close else ""


def kind_of(value: object) -> str:
    """Returns the class of a value with its article, such as "an int"."""
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Returns "a" or "an" and the noun."""
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def visible(text: str) -> str:
    r"""Replaces control characters and lone surrogates by escapes, such as ``\x1b``.

    Line feeds and tabs are unchanged.
    """
    return _CONTROL.sub(_escape, text)


def say(text: str = "", file: TextIO | None = None) -> None:
    """Prints a message and a line feed, with control characters as escapes.

    Args:
        text: The message, which may have several lines.
        file: A text stream. Defaults to standard output.
    """
    print(visible(text), file=file, flush=True)


def write(text: str) -> None:
    """Writes generated text to standard output.

    On a terminal, control characters are written as escapes. Text for a pipe or a file is
    written unchanged.
    """
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
