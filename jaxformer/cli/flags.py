"""Flags and positional arguments of a verb: one for each field of its dataclass."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from jaxformer.cli.values import WORDS, placeholder_of, takes_several


class Spelling(NamedTuple):
    """Marks a field, in its annotation, that is not spelled as --field VALUE."""

    name: str = ""  # instead of the field's name
    short: str = ""  # a second spelling, such as -o
    placeholder: str = ""  # of the value, in the help
    is_positional: bool = False
    is_repeated: bool = False  # each occurrence adds one value to a tuple
    has_negation: bool = True  # of a bool: --no-…


def positional(placeholder: str) -> Spelling:
    """Marks a field as a positional argument."""
    return Spelling(placeholder=placeholder, is_positional=True)


Switch = Annotated[bool, Spelling(has_negation=False)]
OutFile = Annotated[Path | None, Spelling(short="-o")]


def check_out(out: Path | None, suffix: str) -> None:
    """Raises ValueError unless `out` is None or a file with this suffix in an existing folder."""
    if out is not None and (out.suffix != suffix or not out.parent.is_dir()):
        raise ValueError(f"out is {out}; it must be a {suffix} file in an existing folder")


class Flag(NamedTuple):
    """A flag or a positional argument.

    Attributes:
        key: Its name with underscores; mostly the name of the field.
        names: Its spellings: ("--max-length",), ("--residual", "--no-residual") or ("RUN",).
        hint: The type of its value.
        text: Its description.
        value: Its default, or its value in an instance; MISSING if it is required.
        group: The dataclass that has the field.
        spelling: The mark of the field.
    """

    key: str
    names: tuple[str, ...]
    hint: Any
    text: str
    value: object
    group: type
    spelling: Spelling

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.names[0]

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.value is MISSING

    @property
    def is_positional(self) -> bool:
        """Whether it is a positional argument."""
        return self.spelling.is_positional

    @property
    def takes_several(self) -> bool:
        """Whether more than one word may follow it."""
        return takes_several(self.hint) and not self.spelling.is_repeated

    @property
    def placeholder(self) -> str:
        """The placeholder of its value: INT, {a,b}, "FLOAT …"; "" for a switch."""
        if self.is_positional or self.hint is bool:
            return ""
        return self.spelling.placeholder or placeholder_of(self.hint)


def flags_of(kind: type, instance: object = None) -> list[Flag]:
    """Returns the flags of a dataclass and of its nested dataclasses.

    Args:
        kind: The dataclass.
        instance: An instance whose values are the defaults; None: the defaults of the class.
    """
    flags, texts = [], _docstrings(kind)
    for field in fields(kind):
        value = value_in(instance, field)
        if is_section(value):
            flags += flags_of(type(value), value)
        else:
            hint, spelling = _spelled(kind, field.name)
            key, text = spelling.name or field.name, texts.get(field.name, "")
            names = _names(key, hint, spelling)
            flags.append(Flag(key, names, hint, text, value, kind, spelling))
    return flags


def value_in(instance: object, field: Field) -> Any:
    """Returns the value of a field in an instance; None: its default, MISSING if it has none."""
    if instance is not None:
        return getattr(instance, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def is_section(value: object) -> bool:
    """Returns whether a value is a dataclass whose fields are flags."""
    return is_dataclass(value) and type(value) not in WORDS


def key_of(kind: type, field: str) -> str:
    """Returns the key of the flag of a dataclass's field."""
    return _spelled(kind, field)[1].name or field


_hints = cache(partial(get_type_hints, include_extras=True))


def _spelled(kind: type, field: str) -> tuple[Any, Spelling]:
    """Returns the type of a field and its mark."""
    hint = _hints(kind)[field]
    bare, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return bare, next((mark for mark in marks if isinstance(mark, Spelling)), Spelling())


def _names(key: str, hint: Any, spelling: Spelling) -> tuple[str, ...]:
    name = key.replace("_", "-")
    if spelling.is_positional:
        return (spelling.placeholder,)
    negation = [f"--no-{name}"] * (hint is bool and spelling.has_negation)
    return (*[spelling.short] * bool(spelling.short), f"--{name}", *negation)


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
