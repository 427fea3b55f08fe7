"""Output of `--help`, and tables as wide as the terminal."""

import inspect
import re
import shutil
import textwrap
from itertools import takewhile

from jaxformer.cli.flags import Flag, default_text

HELP = ("-h", "--help", "--help-all")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_COLUMN = 26  # the column where descriptions start
_WIDTHS = (40, 100)  # minimum and maximum width of the text


def asks_for_help(argv: list[str]) -> bool:
    """Returns whether the command line has a help flag, before the word -- if there is one."""
    return any(word in HELP for word in takewhile(lambda word: word != "--", argv))


def text_width() -> int:
    """Returns the width of printed text: that of the terminal, limited to 40 … 100 columns."""
    least, most = _WIDTHS
    return max(least, min(most, shutil.get_terminal_size().columns))


def table_of(rows: dict[str, str]) -> str:
    """Returns a two-column table of names and their descriptions."""
    indent = " " * (max(map(len, rows)) + 4)
    lines = []
    for name, text in rows.items():
        begin = f"  {name}".ljust(len(indent))
        lines += textwrap.wrap(text, text_width(), initial_indent=begin, subsequent_indent=indent)
    return "\n".join(lines)


def usage_of(verb: str, flags: list[Flag]) -> str:
    """Returns the command line of a verb with placeholders."""
    options = [flag for flag in flags if not flag.is_positional]
    words = [x.name if x.is_required else f"[{x.name}]" for x in flags if x.is_positional]
    words += [f"{flag.name} {flag.placeholder}" for flag in options if flag.is_required]
    return " ".join(["jaxformer", verb, *words, *["[OPTIONS]"] * bool(options)])


def help_text(
    kind: type, verb: str, flags: list[Flag], lists_all: bool, main: tuple[str, ...] = ()
) -> str:
    """Returns the help of a verb.

    Args:
        kind: The dataclass of its arguments, whose docstring comes first.
        verb: The name of the verb.
        flags: Its flags.
        lists_all: Whether to list all flags.
        main: Names of the flags that come first; without `lists_all`, only these are listed. ():
            all flags.
    """
    width = text_width()
    positional = [flag for flag in flags if flag.is_positional]
    options = [flag for flag in flags if not flag.is_positional]
    first = [flag for name in main for flag in options if flag.name == name]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    parts = [f"usage: {usage_of(verb, flags)}", *(textwrap.fill(x, width) for x in paragraphs)]
    if positional:
        parts.append(_section("", positional, width))
    if options:
        parts.append(_section("options:" if not first else "most used:", first or options, width))
    if first and lists_all:
        rest = [flag for flag in options if flag not in first]
        for group in dict.fromkeys(flag.group for flag in rest):
            of_group = [flag for flag in rest if flag.group is group]
            parts.append(_section(f"{_title(group)}:", of_group, width))
    elif first:
        more = f"jaxformer {verb} --help-all lists all {len(options)} options."
        parts.append(textwrap.fill(more, width))
    return "\n\n".join(parts)


def _title(group: type) -> str:
    """Returns the name of a class as words: "text training" for TextTraining."""
    name = re.sub(r"(Config|Arguments)$", "", group.__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _section(title: str, flags: list[Flag], width: int) -> str:
    lines = [line for flag in flags for line in _lines(flag, width)]
    return "\n".join([title, *lines] if title else lines)


def _lines(flag: Flag, width: int) -> list[str]:
    """Returns a flag's lines: its spelling on the left, its description in a second column."""
    spelling = ", ".join(flag.names) + f" {flag.placeholder}" * bool(flag.placeholder)
    text = flag.text
    if flag.is_required:
        text += " (required)"
    elif not flag.is_positional:
        default = f"(default: {default_text(flag.value)})"
        fits = len(default) <= width - _COLUMN
        text += " " + (default.replace(" ", _NO_BREAK, 1) if fits else default)
    if len(spelling) + 4 <= _COLUMN:
        return _wrapped(text, width, f"  {spelling}".ljust(_COLUMN), _COLUMN)
    if len(spelling) + 2 > width:
        spelling = spelling.replace(",", ", ")
    above = _wrapped(spelling, width, "  ", 6)
    return [*above, *_wrapped(text, width, " " * _COLUMN, _COLUMN)]


def _wrapped(text: str, width: int, begin: str, indent: int) -> list[str]:
    indents = {"initial_indent": begin, "subsequent_indent": " " * indent}
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **indents)
    return [line.replace(_NO_BREAK, " ") for line in lines]
