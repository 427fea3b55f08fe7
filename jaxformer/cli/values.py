"""Values as words of the command line: how they are read, and how the help shows them."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from jaxformer.artifacts.files import parse_json
from jaxformer.models.config.check import from_fields, shown
from jaxformer.models.config.rotary import RotaryScaling
from jaxformer.training.config import MeshSizes


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
