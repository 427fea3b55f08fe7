"""Checks for the fields of configs. Errors name the field, its value and the accepted values.

`check_fields` compares every field of a dataclass with its annotation. The annotations are also the
schema of config.json: `from_fields` builds a dataclass from a JSON object and rejects unknown keys.
"""

import math
from dataclasses import MISSING, fields
from functools import cache
from numbers import Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jaxformer.terminal import visible

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

type_hints = cache(get_type_hints)

LARGEST = 2**31 - 1  # counts and sizes have 32 bits on the device
# Building a model takes time for every layer, so a config file must not request a million of them.
_MOST = {"num_layers": 4096, "num_encoder_layers": 4096}
_MOST_SHOWN = 80  # maximum number of characters of a value in a message
_MISMATCH = object()
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a path",
    dict: "an object",
    NoneType: "None",
}


def check_fields(config: "DataclassInstance") -> None:
    """Checks and converts every field of a frozen dataclass by its annotation.

    NumPy and JAX scalars become Python scalars, which JSON can store. Lists become tuples. Dicts
    become the dataclass of the annotation. Integers must fit into 32 bits, except `seed`, which has
    its own check.

    Args:
        config: The dataclass instance; its fields are replaced in place.

    Raises:
        ValueError: A field has the wrong type, or is none of the choices of a `Literal`.
    """
    for name in (field.name for field in fields(config)):
        value = converted(name, getattr(config, name), type_hints(type(config))[name])
        for entry in entries(value):
            _check_entry(name, entry)
        object.__setattr__(config, name, value)


def _check_entry(name: str, value: Any) -> None:
    """Raises ValueError for an integer that is too large or a string with control characters."""
    most = _MOST.get(name, LARGEST)
    if type(value) is int and value > most and name != "seed":
        raise ValueError(f"{name} is {shown(value)}; it must be at most {most}")
    if isinstance(value, str) and visible(value) != value:
        raise ValueError(f"{name} is {shown(value)}; it must not hold control characters")


def from_fields(kind: type, content: dict) -> Any:
    """Builds a dataclass from an object of a JSON file.

    Args:
        kind: The dataclass.
        content: The JSON object. Its keys must be fields of `kind`.

    Raises:
        ValueError: A key is unknown or missing, or `kind` rejects a value.
    """
    unknown = [name for name in content if name not in kind.__dataclass_fields__]
    if unknown:
        names = ", ".join(map(shown, unknown))
        raise ValueError(f"{names} is no field of {kind.__name__}; remove it")
    for field in fields(kind):
        if field.default is field.default_factory is MISSING and field.name not in content:
            raise ValueError(f"{field.name} is missing; {kind.__name__} requires it")
    return kind(**content)


def converted(name: str, value: Any, hint: Any) -> Any:
    """Returns the value, converted to the type of an annotation.

    Args:
        name: The field's name, for the error message.
        value: The value.
        hint: The annotation.

    Raises:
        ValueError: The annotation does not accept the value.
    """
    found = _convert(name, value, hint)
    if found is _MISMATCH:
        raise ValueError(f"{name} is {shown(value)}; it must be {_words(hint)}")
    return found


def shown(value: Any) -> str:
    """Returns the `repr` of a value for a message: on one line and at most 81 characters long."""
    if isinstance(value, int) and abs(value) >= 10**_MOST_SHOWN:
        return f"a number of {math.ceil(value.bit_length() * math.log10(2))} digits"
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # too deeply nested; an integer with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Returns the value converted to the annotation's type, or _MISMATCH."""
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a NumPy or JAX scalar
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        found = (_convert(name, value, each) for each in inner)
        return next((x for x in found if x is not _MISMATCH), _MISMATCH)
    if kind is Literal:
        return _choice(value, inner)
    if kind is tuple:
        return _sequence(name, value, inner)
    if kind is dict:
        return _mapping(name, value, inner[1])
    if hint in _WORDS:
        return _scalar(value, hint)
    return _dataclass(name, value, hint)


def _choice(value: Any, choices: tuple) -> Any:
    """Returns the matching choice. A NumPy or JAX dtype matches its name."""
    if not isinstance(value, str | int | None):
        value = getattr(value, "name", getattr(value, "__name__", value))
    return next((x for x in choices if type(x) is type(value) and x == value), _MISMATCH)


def _sequence(name: str, value: Any, hints: tuple) -> Any:
    """Converts the entries of a tuple. `hints` are the arguments of the annotation `tuple[…]`."""
    if not isinstance(value, list | tuple):
        return _MISMATCH
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        return _MISMATCH
    found = tuple(_convert(name, entry, hint) for entry, hint in zip(value, hints, strict=True))
    return _MISMATCH if any(entry is _MISMATCH for entry in found) else found


def _mapping(name: str, value: Any, hint: Any) -> Any:
    if not isinstance(value, dict):
        return _MISMATCH
    found = {key: _convert(f"{name}.{key}", entry, hint) for key, entry in value.items()}
    return _MISMATCH if any(entry is _MISMATCH for entry in found.values()) else found


def _scalar(value: Any, kind: type) -> Any:
    if kind is str:
        return value if isinstance(value, str) else _MISMATCH
    if kind is Path:
        return Path(value) if isinstance(value, str) and "\0" not in value else _MISMATCH
    if kind is float and type(value) in (int, float):
        try:
            return float(value) if value == value else _MISMATCH
        except OverflowError:
            return _MISMATCH
    return value if type(value) is kind else _MISMATCH


def _dataclass(name: str, value: Any, hint: type) -> Any:
    if isinstance(value, hint):
        return value
    if not isinstance(value, dict):
        return _MISMATCH
    try:
        return from_fields(hint, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _words(hint: Any) -> str:
    """Describes the values that an annotation accepts."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {inner}" if len(inner) > 1 else repr(inner[0])
    if kind is tuple and inner[-1] is not Ellipsis:
        return f"a list of {' and '.join(map(_words, inner))}"
    if kind is tuple:
        return f"a list, each entry {_words(inner[0])}"
    if kind is dict:
        return f"an object, each value {_words(inner[1])}"
    if kind in (Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    return _WORDS.get(hint, f"an object ({hint.__name__})")


def check_at_least(least: int, config: "DataclassInstance", *names: str) -> None:
    """Checks that fields, and the entries of patterns, are whole numbers of at least `least`.

    None passes if it is the field's default.

    Args:
        least: The smallest accepted value.
        config: The dataclass instance; NumPy integers in its fields become Python integers.
        *names: Names of the fields.

    Raises:
        ValueError: A value is not a whole number, or is too small.
    """
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        checked = tuple(
            None if entry is None is default else whole_number(name, entry, least)
            for entry in entries(value)
        )
        object.__setattr__(config, name, checked if isinstance(value, tuple) else checked[0])


def check_not_empty(config: "DataclassInstance", *names: str) -> None:
    """Checks that fields which hold a pattern (a tuple with entries for layers) are not empty."""
    for name in names:
        if getattr(config, name) == ():
            raise ValueError(f"{name} is empty; a pattern must have at least one entry")


def entries(value: Any) -> tuple:
    """Returns a pattern's entries, or a tuple of the one value that all layers share."""
    return value if isinstance(value, tuple) else (value,)


def whole_number(name: str, value: Any, least: int) -> int:
    """Returns the value as a Python int; raises ValueError unless it is at least `least`."""
    is_flag = type(value).__name__ == "bool"  # also NumPy's, which old versions convert to an index
    if is_flag or not hasattr(value, "__index__") or index(value) < least:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number of at least {least}")
    return index(value)


def check_positive(config: "DataclassInstance", *names: str) -> None:
    """Checks that fields, and the entries of patterns, are above 0 and finite.

    None passes if it is the field's default or an entry of a pattern.

    Args:
        config: The dataclass instance.
        *names: Names of the fields.

    Raises:
        ValueError: A value is not a positive finite number.
    """
    for name in names:
        setting, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        may_be_none = isinstance(setting, tuple) or default is None
        for value in entries(setting):
            if not (_is_positive(value) or (value is None and may_be_none)):
                raise ValueError(f"{name} is {value!r}; it must be above 0 and finite")


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0.0 < float(value) < float("inf")


def check_fraction(config: "DataclassInstance", *names: str) -> None:
    """Checks that fields are in [0, 1); raises ValueError otherwise."""
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be in [0, 1)")
