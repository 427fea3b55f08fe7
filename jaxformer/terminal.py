"""Text output to a terminal.

Names, keys and tokens come from files that somebody else may have written. A terminal would execute
the escape sequences in them, so every message of the command line passes through `visible`.
"""

import re
import sys
from typing import TextIO

# C0 except tab and line feed, DEL, C1, the characters that reverse the order of a line, and lone
# surrogates, which UTF-8 cannot encode.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Returns the text with control characters and lone surrogates as escapes, such as ``\x1b``.

    Line feeds and tabs are unchanged.
    """
    return _CONTROL.sub(_escape, text)


def say(text: str = "", file: TextIO | None = None) -> None:
    """Prints a message, with control characters as escapes, and a line feed.

    Args:
        text: The message, one line or several.
        file: A text stream; None: standard output.
    """
    print(visible(text), file=file, flush=True)


def write(text: str) -> None:
    """Writes generated text to standard output.

    On a terminal, control characters become escapes. A pipe or a file gets them unchanged.
    """
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
