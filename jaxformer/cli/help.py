"""Output of `--help`, and tables as wide as the terminal."""

import inspect
import re
import shutil
import textwrap
from itertools import takewhile

from jaxformer.cli.flags import Flag, default_text

HELP = ("-h", "--help", "--help-all")
_NO_BREAK = "\N{NO-BREAK SPACE}"
# The column at which the descriptions of flags start.
_COLUMN = 26
# The minimum and the maximum width of printed text.
_WIDTHS = (40, 100)


def asks_for_help(argv: list[str]) -> bool:
    """Returns whether the command line has a help flag; words after `--` do not count."""
    return any(word in HELP for word in takewhile(lambda word: word != "--", argv))


def text_width() -> int:
    """Returns the width of printed text: the terminal's width, limited to 40 … 100 columns."""
    least, most = _WIDTHS
    return max(least, min(most, shutil.get_terminal_size().columns))


def format_table(rows: dict[str, str]) -> str:
    """Returns a two-column table of names and their descriptions."""
    indent = " " * (max(map(len, rows)) + 4)
    lines = []
    for name, text in rows.items():
        begin = f"  {name}".ljust(len(indent))
        lines += textwrap.wrap(text, text_width(), initial_indent=begin, subsequent_indent=indent)
    return "\n".join(lines)


def format_usage(verb: str, flags: list[Flag]) -> str:
    """Returns the command line of a subcommand with placeholders."""
    options = [flag for flag in flags if not flag.is_positional]
    words = [x.name if x.is_required else f"[{x.name}]" for x in flags if x.is_positional]
    words += [f"{flag.name} {flag.placeholder}" for flag in options if flag.is_required]
    return " ".join(["jaxformer", verb, *words, *["[OPTIONS]"] * bool(options)])


def help_text(
    kind: type, verb: str, flags: list[Flag], lists_all: bool, main: tuple[str, ...] = ()
) -> str:
    """Returns the help of a subcommand.

    Args:
        kind: The dataclass of the arguments. The docstring of `kind` follows the usage line.
        verb: The name of the subcommand.
        flags: The flags of the subcommand.
        lists_all: Whether to list all flags, not only the flags in `main`.
        main: The names of the most used flags, which are listed first. If empty, all flags are
            listed.
    """
    width = text_width()
    positional = [flag for flag in flags if flag.is_positional]
    options = [flag for flag in flags if not flag.is_positional]
    first = [flag for name in main for flag in options if flag.name == name]
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    parts = [f"usage: {format_usage(verb, flags)}", *(textwrap.fill(x, width) for x in paragraphs)]
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
    """Splits the name of a class into words: "text training" for TextTraining."""
    name = re.sub(r"(Config|Arguments)$", "", group.__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _section(title: str, flags: list[Flag], width: int) -> str:
    lines = [line for flag in flags for line in _lines(flag, width)]
    return "\n".join([title, *lines] if title else lines)


def _lines(flag: Flag, width: int) -> list[str]:
    """Returns the lines of a flag: the spelling on the left and the description on the right."""
    spelling = ", ".join(flag.names) + f" {flag.placeholder}" * bool(flag.placeholder)
    column = _COLUMN if width >= 2 * _COLUMN else 6
    text = _described(flag, width - column)
    if len(spelling) + 4 <= column:
        return _wrapped(text, width, f"  {spelling}".ljust(column), column)
    if len(spelling) + 2 > width:
        spelling = spelling.replace(",", ", ")
    above = _wrapped(spelling, width, "  ", 6)
    return [*above, *_wrapped(text, width, " " * column, column)]


def _described(flag: Flag, width: int) -> str:
    """Returns the description of a flag with its default.

    If the default is None, the field's docstring explains the default in words: "width of a head;
    default: embed_dim / num_heads".
    """
    text, _, derived = flag.text.partition("; default: ")
    if flag.is_required:
        return f"{text} (required)"
    if flag.is_positional:
        return text
    words = (derived or "none") if flag.value is None else default_text(flag.value)
    default = f"(default: {words})"
    together = default.replace(" ", _NO_BREAK, 1) if len(default) <= width else default
    return f"{text} {together}"


def _wrapped(text: str, width: int, begin: str, indent: int) -> list[str]:
    indents = {"initial_indent": begin, "subsequent_indent": " " * indent}
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **indents)
    return [line.replace(_NO_BREAK, " ") for line in lines]
