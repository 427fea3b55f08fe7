"""Flags and positional arguments of a subcommand, derived from the fields of a dataclass."""

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
from jaxformer.models.config.needs import Spelling
from jaxformer.models.config.transformer import RotaryScaling
from jaxformer.training.config import MeshSizes


def positional(placeholder: str) -> Spelling:
    """Marks a field as a positional argument."""
    return Spelling(placeholder=placeholder, is_positional=True)


Switch = Annotated[bool, Spelling(has_negation=False)]
OutFile = Annotated[Path | None, Spelling(short="-o")]
# The names of the ignored generation options. Each --ignore-generation-config adds one name.
IgnoredOptions = Annotated[tuple[str, ...], Spelling(placeholder="NAME", is_repeated=True)]


def check_out(out: Path | None, suffix: str) -> None:
    """Raises ValueError unless `out` is None or a file with this suffix in an existing folder."""
    if out is not None and (out.suffix != suffix or not out.parent.is_dir()):
        raise ValueError(f"out is {out}; it must be a {suffix} file in an existing folder")


class Flag(NamedTuple):
    """A flag or a positional argument.

    Attributes:
        key: The flag's name with underscores, usually the name of the dataclass field.
        names: The spellings: ("--max-length",), ("--residual", "--no-residual") or ("RUN",).
        hint: The type of the value.
        text: The description.
        value: The value of the field in the instance, or the field's default. MISSING if the
            argument is required.
        group: The dataclass that has the field.
        field: The name of the field.
        spelling: The metadata of the field.
    """

    key: str
    names: tuple[str, ...]
    hint: Any
    text: str
    value: object
    group: type
    field: str
    spelling: Spelling

    @property
    def name(self) -> str:
        """The first spelling of the flag."""
        return self.names[0]

    @property
    def is_required(self) -> bool:
        """Whether the argument is required."""
        return self.value is MISSING

    @property
    def is_positional(self) -> bool:
        """Whether the argument is positional."""
        return self.spelling.is_positional

    @property
    def takes_several(self) -> bool:
        """Whether the argument accepts several words."""
        return takes_several(self.hint) and not self.spelling.is_repeated

    @property
    def placeholder(self) -> str:
        """The placeholder of the value: INT, {a,b}, "FLOAT …", or "" for a switch."""
        if self.is_positional or self.hint is bool:
            return ""
        return self.spelling.placeholder or make_placeholder(self.hint)


def list_flags(kind: type, instance: object = None) -> list[Flag]:
    """Returns the flags of a dataclass and of its nested dataclasses.

    Args:
        kind: The dataclass.
        instance: An instance of `kind` that provides the defaults. If None, the fields' own
            defaults apply.
    """
    flags, texts = [], _docstrings(kind)
    for field in fields(kind):
        value = value_in(instance, field)
        if is_section(value):
            flags += list_flags(type(value), value)
        else:
            hint, spelling = _spelled(kind, field.name)
            key, text = spelling.name or field.name, texts.get(field.name, "")
            names = _names(key, hint, spelling)
            flags.append(Flag(key, names, hint, text, value, kind, field.name, spelling))
    return flags


def field_values(instance: object) -> dict[str, Any]:
    """Returns {key of a flag: field value} of a dataclass and of its nested dataclasses."""
    return {flag.key: flag.value for flag in list_flags(type(instance), instance)}


def value_in(instance: object, field: Field) -> Any:
    """Returns the value of a field in `instance` or, if `instance` is None, the field's default.

    Returns MISSING for a required field.
    """
    if instance is not None:
        return getattr(instance, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def is_section(value: object) -> bool:
    """Returns whether a value is a dataclass whose fields are flags."""
    return is_dataclass(value) and type(value) not in WORDS


def flag_key(kind: type, field: str) -> str:
    """Returns the `Flag.key` that belongs to a field of a dataclass."""
    return _spelled(kind, field)[1].name or field


_hints = cache(partial(get_type_hints, include_extras=True))


def _spelled(kind: type, field: str) -> tuple[Any, Spelling]:
    """Returns the type of a field and the `Spelling` from its annotation."""
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
    """Returns the docstrings below the fields of a class and its bases, each joined to one line."""
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


# ---- values on the command line


class Words(NamedTuple):
    """Describes how values of one type are written on the command line.

    Attributes:
        placeholder: The placeholder of the value in help texts.
        read: Converts a word of the command line to a value. Raises ValueError or KeyError if the
            word is invalid.
        accepted: The description of the accepted words in error messages. If empty, a message
            contains the text of the exception from `read`.
    """

    placeholder: str
    read: Callable[[str], object]
    accepted: str = ""


def read_value(name: str, hint: Any, words: list[str]) -> Any:
    """Returns the value of an argument.

    For `int | tuple[int | None, ...]`, `["8"]` becomes 8, and `["8", "None"]` becomes (8, None).

    Args:
        name: The name of the argument, for error messages.
        hint: The type of the argument's value.
        words: One word, or several words if the type `takes_several`.

    Raises:
        ValueError: a word is not accepted.
    """
    single = [member for member in _members(hint) if get_origin(member) is not tuple]
    values = tuple(_read_word(name, hint, word) for word in words)
    is_single = len(values) == 1 and single and (values[0] is not None or NoneType in single)
    return values[0] if is_single else values


def takes_several(hint: Any) -> bool:
    """Returns whether a value may be a tuple, so that a flag accepts several words."""
    return any(get_origin(member) is tuple for member in _members(hint))


def make_placeholder(hint: Any) -> str:
    """Returns the placeholder for a value of this type, such as INT, {a,b} or "FLOAT …"."""
    word = _type_words(_entries(hint)).placeholder
    return f"{word} …" if takes_several(hint) and not word.endswith("…") else word


def _read_word(name: str, hint: Any, word: str) -> object:
    words, optional = _type_words(_entries(hint)), NoneType in _entries(hint)
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
    """Returns the types that a single word may have.

    If `hint` is or contains a tuple type, the function returns the types of the tuple's entries.
    Otherwise the function returns the members of the union `hint`, or the single type `hint`.
    """
    tuples = (member for member in _members(hint) if get_origin(member) is tuple)
    return next((_members(get_args(each)[0]) for each in tuples), _members(hint))


def _type_words(entries: tuple) -> Words:
    """Returns the `Words` of the single type in `entries`, which may also contain None."""
    (kind,) = (entry for entry in entries if entry is not NoneType)
    if get_origin(kind) is not Literal:
        return WORDS[kind]
    choices = {str(choice): choice for choice in get_args(kind)}
    return Words("{" + ",".join(choices) + "}", choices.__getitem__, f"one of {', '.join(choices)}")


def _read_mesh(word: str) -> MeshSizes:
    """Parses mesh sizes such as data=2,fsdp=4."""
    axes = MeshSizes.__dataclass_fields__
    sizes = _pairs(word.split(","), "each axis must be NAME=SIZE")
    if sizes.keys() - axes.keys():
        raise ValueError(f"the axes are {', '.join(axes)}")
    return MeshSizes(**{name: _number(size) for name, size in sizes.items()})


def _read_scaling(word: str) -> RotaryScaling:
    """Parses a rotary scaling such as yarn,factor=4,original_length=4096."""
    kind, *parts = word.split(",")
    values = _pairs(parts, "write it as KIND,NAME=VALUE,NAME=VALUE")
    scaling = from_fields(RotaryScaling, {"kind": kind, **{x: _number(values[x]) for x in values}})
    for name in values:
        if not all(need.holds({"kind": kind}) for need in RotaryScaling.needs.get(name, ())):
            raise ValueError(f"{kind} does not use {name}")
    return scaling


def _pairs(parts: list[str], rule: str) -> dict[str, str]:
    """Parses NAME=VALUE parts to a dict; raises ValueError with the message `rule`."""
    pairs = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(pairs) < len(parts):
        raise ValueError(f"{rule}, and no name may occur twice")
    return pairs


def _number(word: str) -> Any:
    """Parses a word as JSON.

    A word that is not JSON is returned unchanged, and the later check of the field rejects it.
    """
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
