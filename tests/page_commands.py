"""Finds the commands in Markdown pages, both in shell blocks and in sentences."""

import re
import shlex
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path

from jaxformer.cli import VERBS

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(
        path for room in ("docs", "experiments", "tests") for path in (ROOT / room).rglob("*.md")
    ),
]
Words = tuple[str, ...]

_BLOCK = re.compile(
    r"^ *(?P<fence>```+|~~~+) *(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^ *(?P=fence)",
    re.MULTILINE | re.DOTALL,
)
_SHELLS = ("", "sh", "bash", "shell", "zsh", "console")
_SEPARATORS = "();&|"
_QUOTED_OR_COMMENT = re.compile(r"""("[^"]*"|'[^']*')|(?<!\S)#.*""")
_NAMED = re.compile(r"\bjaxformer\s")


def commands_of(page: str) -> set[Words]:
    """Returns the words after `jaxformer` of each command on a page.

    A mere name in a sentence, such as `jaxformer train`, is not a command, because it has no
    arguments.

    Args:
        page: The text of the page.
    """
    blocks = [block["code"] for block in _BLOCK.finditer(page) if block["language"] in _SHELLS]
    found = {words for block in blocks for words in commands_in(block)}
    named = filter(_NAMED.search, re.findall(r"`([^`]+)`", _BLOCK.sub("", page)))
    in_sentences = {words for text in named for words in commands_in(" ".join(text.split()))}
    return found | {words for words in in_sentences if len(words) > 1}


def commands_in(script: str) -> Iterator[Words]:
    """Yields the words after `jaxformer` of each command in a shell script.

    Args:
        script: The lines of a shell. If some lines begin with the prompt `$ `, the other lines are
            output.
    """
    lines = re.sub(r"\\\n\s*(> )?", " ", script).splitlines()
    prompted = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
    for line in prompted or lines:
        for simple in _simple_commands(line):
            yield from _arguments(simple)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yields the words of each command between separators such as `;`, `&&`, `|` and
    parentheses."""
    lexer = shlex.shlex(
        _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", line),
        posix=True,
        punctuation_chars=_SEPARATORS,
    )
    lexer.whitespace_split, lexer.commenters = True, ""
    for separates, words in groupby(lexer, lambda word: set(word) <= set(_SEPARATORS)):
        if not separates:
            yield list(takewhile(lambda word: not re.match(r"\d*>|<$", word), words))


def _arguments(simple: list[str]) -> Iterator[Words]:
    """Yields the words after `jaxformer`, even after other programs or inside quotes."""
    for i, word in enumerate(simple):
        is_started = (
            i == 0 or simple[i - 1] == "-m" or simple[i + 1 : i + 2] in [[x] for x in VERBS]
        )
        if Path(word).name == "jaxformer" and is_started:
            yield tuple(simple[i + 1 :])
            return
    for word in filter(_NAMED.search, simple):
        yield from commands_in(word)
