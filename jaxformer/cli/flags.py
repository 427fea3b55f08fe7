"""Flags and positional arguments of a verb: one for each field of its dataclass, and its words."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxformer.artifacts.files import parse_json
from jaxformer.models.config.check import from_fields, shown
from jaxformer.models.config.transformer import RotaryScaling
from jaxformer.training.config import MeshSizes


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
# Names of options, one for each --ignore-generation-config.
IgnoredOptions = Annotated[tuple[str, ...], Spelling(placeholder="NAME", is_repeated=True)]


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


def field_values(instance: object) -> dict[str, Any]:
    """Returns the values of a dataclass and of its nested dataclasses by the keys of flags."""
    return {flag.key: flag.value for flag in flags_of(type(instance), instance)}


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


# ---- values as words


class Words(NamedTuple):
    """The words that stand for values of one type."""

    placeholder: str
    read: Callable[[str], object]  # raises ValueError or KeyError for other words
    accepted: str = ""  # describes the words for error messages; "": the errors of `read` do


def read_value(name: str, hint: Any, words: list[str]) -> Any:
    """Returns the value of an argument.

    For `int | tuple[int | None, ...]`, the word 8 gives 8, and the words 8 None give (8, None).

    Args:
        name: The name of the argument, for error messages.
        hint: The type of its value.
        words: One word, or any number if the type `takes_several`.

    Raises:
        ValueError: A word is not accepted.
    """
    single = [member for member in _members(hint) if get_origin(member) is not tuple]
    values = tuple(_read_word(name, hint, word) for word in words)
    is_single = len(values) == 1 and single and (values[0] is not None or NoneType in single)
    return values[0] if is_single else values


def takes_several(hint: Any) -> bool:
    """Returns whether a value may be a tuple, so that several words may follow a flag."""
    return any(get_origin(member) is tuple for member in _members(hint))


def placeholder_of(hint: Any) -> str:
    """Returns the placeholder for a value of this type, such as INT, {a,b} or "FLOAT …"."""
    word = _words_of(_entries(hint)).placeholder
    return f"{word} …" if takes_several(hint) and not word.endswith("…") else word


def _read_word(name: str, hint: Any, word: str) -> object:
    words, optional = _words_of(_entries(hint)), NoneType in _entries(hint)
    if word == "None" and optional:
        return None
    try:
        return words.read(word)
    except (ValueError, KeyError) as error:
        reason = f"it must be {words.accepted}{' or None' * optional}" if words.accepted else error
        raise ValueError(f"{name} is {shown(word)}; {reason}") from None


def _members(hint: Any) -> tuple:
    """Returns the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _entries(hint: Any) -> tuple:
    """Returns the types of one word: those of a tuple's entries or, without tuples, the members."""
    tuples = (member for member in _members(hint) if get_origin(member) is tuple)
    return next((_members(get_args(each)[0]) for each in tuples), _members(hint))


def _words_of(entries: tuple) -> Words:
    """Returns the words for the one of these types that is not None."""
    (kind,) = (entry for entry in entries if entry is not NoneType)
    if get_origin(kind) is not Literal:
        return WORDS[kind]
    choices = {str(choice): choice for choice in get_args(kind)}
    return Words("{" + ",".join(choices) + "}", choices.__getitem__, f"one of {', '.join(choices)}")


def _read_mesh(word: str) -> MeshSizes:
    """Returns the sizes of a word such as data=2,fsdp=4."""
    axes = MeshSizes.__dataclass_fields__
    sizes = _pairs(word.split(","), "each axis must be NAME=SIZE")
    if sizes.keys() - axes.keys():
        raise ValueError(f"the axes are {', '.join(axes)}")
    return MeshSizes(**{name: _number(size) for name, size in sizes.items()})


def _read_scaling(word: str) -> RotaryScaling:
    """Returns the scaling of a word such as yarn,factor=4,original_length=4096."""
    kind, *parts = word.split(",")
    values = _pairs(parts, "after the kind, each part must be NAME=VALUE")
    scaling = from_fields(RotaryScaling, {"kind": kind, **{x: _number(values[x]) for x in values}})
    for name in values:
        if not all(need.holds({"kind": kind}) for need in RotaryScaling.needs.get(name, ())):
            raise ValueError(f"{kind} does not use {name}")
    return scaling


def _pairs(parts: list[str], rule: str) -> dict[str, str]:
    """Returns the values of NAME=VALUE parts by name; raises ValueError with `rule` otherwise."""
    pairs = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(pairs) < len(parts):
        raise ValueError(f"{rule}, and no name may occur twice")
    return pairs


def _number(word: str) -> Any:
    """Returns the JSON value of a word, or the word, which the check of its field then refuses."""
    try:
        return parse_json(word)
    except ValueError:
        return word


WORDS = {
    bool: Words("{True,False}", {"True": True, "False": False}.__getitem__, "one of True, False"),
    int: Words("INT", int, "a whole number"),
    float: Words("FLOAT", float, "a number"),
    str: Words("TEXT", str),
    Path: Words("PATH", Path),
    MeshSizes: Words("AXIS=SIZE,…", _read_mesh),
    RotaryScaling: Words("KIND,FACTOR=X,…", _read_scaling),
}


def default_text(value: object) -> str:
    """Returns a default value as text."""
    match value:
        case True | False:
            return "on" if value else "off"
        case "":
            return "empty"
        case ():
            return "none"
        case tuple():
            return " ".join(map(default_text, value))
        case float():
            return f"{value:g}"
        case MeshSizes():
            return ",".join(f"{x.name}={getattr(value, x.name)}" for x in fields(value))
        case RotaryScaling():
            return f"{value.kind},factor={value.factor:g},…"
    return str(value)
