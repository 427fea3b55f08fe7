"""Flags of a verb, read from the dataclass of its arguments, and the output of `--help`."""

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from jaxformer.models.config.rotary import RotaryScaling, Scaling
from jaxformer.training.mesh_sizes import Mesh, MeshSizes

_WORDS = {bool: "{True,False}", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_WORDS |= {Mesh: "AXIS=SIZE,…", Scaling: "KIND,FACTOR=X,…"}
HELP = ("-h", "--help", "--help-all")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_COLUMN = 26  # the column where descriptions start
_WIDTHS = (40, 100)  # minimum and maximum width of the text


class Flag(NamedTuple):
    """A flag or a positional argument.

    Attributes:
        names: Its spellings: ("--max-length",), ("--residual", "--no-residual") or ("RUN",).
        placeholder: The placeholder of its value: INT, {a,b}, "FLOAT …"; "" for a switch.
        text: Its description.
        default: Its default as text; None if the flag is required.
        group: The dataclass that has the field.
    """

    names: tuple[str, ...]
    placeholder: str
    text: str
    default: str | None
    group: type

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.names[0]

    @property
    def is_positional(self) -> bool:
        """Whether it is a positional argument."""
        return not self.name.startswith("-")


_hints = cache(partial(get_type_hints, include_extras=True))


def flags_of(kind: type, default: object = None) -> list[Flag]:
    """Returns the flags of a dataclass and of its nested dataclasses.

    Args:
        kind: The class, which may be an alias such as TrainArguments[TextTraining].
        default: An instance whose values are the defaults; None: the defaults of the class.
    """
    return list(_flags(get_origin(kind) or kind, default))


def _flags(kind: type, default: object) -> Iterator[Flag]:
    hints, texts = _hints(kind), _docstrings(kind)
    for field in fields(kind):
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(value) and not isinstance(value, Mesh | Scaling):
            yield from _flags(type(value), value)
        else:
            yield _flag(kind, field.name, hints[field.name], texts.get(field.name, ""), value)


def _default(field: Field) -> Any:
    """Returns a field's default, or MISSING if the field is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _flag(kind: type, field: str, hint: Any, text: str, value: object) -> Flag:
    bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    name = _name(field, marks).replace("_", "-")
    word = next((x.metavar for x in marks if getattr(x, "metavar", None)), None)
    if tyro.conf.Positional in marks:
        names, placeholder = [word or field.upper()], ""
    elif bare is bool:
        is_pair = tyro.conf.FlagCreatePairsOff not in marks
        names, placeholder = [f"--{name}", *[f"--no-{name}"] * is_pair], ""
    else:
        short = [alias for x in marks for alias in getattr(x, "aliases", None) or ()]
        names, placeholder = [*short, f"--{name}"], word or _placeholder(bare)
    default = None if value is MISSING else words_of(value)
    return Flag(tuple(names), placeholder, text, default, kind)


def argument_name(kind: type, field: str) -> str:
    """Returns the name of a dataclass's field on the command line, with underscores."""
    hint = _hints(kind)[field]
    return _name(field, get_args(hint)[1:] if get_origin(hint) is Annotated else ())


def _name(field: str, marks: Iterable) -> str:
    """Returns the name that an annotation gives to a field; without one, the field's name."""
    return next((x.name for x in marks if getattr(x, "name", None)), field)


def _placeholder(hint: Any) -> str:
    """Returns the placeholder for a value of this type, such as INT, {a,b} or "FLOAT …"."""
    if get_origin(hint) is Annotated:
        return _placeholder(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return f"{_placeholder(get_args(hint)[0])} …"
    members = [member for member in get_args(hint) if member not in (NoneType, Ellipsis)]
    if not members:
        return _WORDS.get(hint, "VALUE")
    return max(map(_placeholder, members), key=lambda word: word.endswith("…"))


def words_of(value: object) -> str:
    """Returns a default value as text, in the spelling of the command line."""
    match value:
        case True | False:
            return "on" if value else "off"
        case "":
            return "empty"
        case ():
            return "none"
        case tuple():
            return " ".join(map(words_of, value))
        case float():
            return f"{value:g}"
        case MeshSizes():
            return ",".join(f"{x.name}={getattr(value, x.name)}" for x in fields(value))
        case RotaryScaling():
            return f"{value.kind},factor={value.factor:g},…"
    return str(value)


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a class and its bases, as one paragraph each."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        (body,) = (x.body for x in tree.body if isinstance(x, ast.ClassDef))
        for pair in pairwise(body):
            match pair:
                case ast.AnnAssign(ast.Name(field)), ast.Expr(ast.Constant(text)):
                    found[field] = " ".join(str(text).split())
    return found


def summary_of(kind: type) -> list[str]:
    """Returns the paragraphs of a class's docstring."""
    text = inspect.getdoc(get_origin(kind) or kind) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def asks_for_help(argv: list[str]) -> bool:
    """Returns whether the command line has a help flag."""
    return any(word in HELP for word in argv)


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


def help_text(
    kind: type, verb: str, argv: list[str], default: object = None, main: tuple[str, ...] = ()
) -> str:
    """Returns the help of a verb.

    Args:
        kind: The dataclass of its arguments.
        verb: The name of the verb.
        argv: The command line; with --help-all the text lists all flags.
        default: An instance whose values are the defaults; None: the defaults of the class.
        main: Names of the flags that come first. Without --help-all, only these are listed. (): all
            flags.
    """
    width = text_width()
    flags = flags_of(kind, default)
    positional = [flag for flag in flags if flag.is_positional]
    options = [flag for flag in flags if not flag.is_positional]
    first = [flag for name in main for flag in options if flag.name == name]
    required = [f"{x.name} {x.placeholder}" for x in options if x.default is None]
    texts = [x.name if x.default is None else f"[{x.name}]" for x in positional]
    words = ["usage: jaxformer", verb, *texts, *required, *["[OPTIONS]"] * bool(options)]
    parts = [" ".join(words), *(textwrap.fill(paragraph, width) for paragraph in summary_of(kind))]
    if positional:
        parts.append(_section("", positional, width))
    if options:
        parts.append(_section("options:" if not first else "most used:", first or options, width))
    if first and "--help-all" in argv:
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
    if flag.default is None:
        text += " (required)"
    elif not flag.is_positional:
        default = f"(default: {flag.default})"
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


def likely_meant(argv: list[str], flags: list[Flag]) -> str:
    """Returns suggestions such as "--promt; did you mean --prompt?" for the unknown flags.

    An unknown flag that resembles no known flag is omitted.

    Args:
        argv: The command line.
        flags: The flags of the verb.
    """
    known = [name for flag in flags if not flag.is_positional for name in flag.names]
    suggestions = []
    for word in argv:
        name = word.partition("=")[0]
        if not name.startswith("-") or name.replace("_", "-") in known:
            continue
        alike = "--" + name.lstrip("-").replace("_", "-").lower()
        if close := get_close_matches(alike, known, n=1, cutoff=0.75):
            suggestions.append(f"{name}; did you mean {close[0]}?")
    return " ".join(suggestions)
