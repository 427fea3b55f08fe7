"""Checks of config fields. Errors name the field, its value and the accepted values.

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

from jaxformer.terminal import did_you_mean, kind_of, visible

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

type_hints = cache(get_type_hints)

# Devices store counts and sizes as 32-bit integers.
LARGEST = 2**31 - 1
# Building each layer of a model takes time, so a config file must not request a million layers.
_MOST = {"num_layers": 4096, "num_encoder_layers": 4096}
# Messages show at most this many characters of a value.
_MOST_SHOWN = 80
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

    NumPy and JAX scalars become Python scalars, which JSON can store. Lists become tuples.
    A dictionary becomes an instance of the annotated dataclass. Integers must fit into 32 bits,
    except `seed`, which is checked separately.

    Args:
        config: The dataclass instance; its fields are replaced in place.

    Raises:
        ValueError: A field has a wrong type, or is not among the choices of a `Literal`.
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
        raise ValueError(f"{name} is {shown(value)}; it must not contain control characters")


def from_fields(kind: type, content: dict) -> Any:
    """Builds a dataclass from a JSON object.

    Args:
        kind: The dataclass.
        content: The JSON object, whose keys are names of fields of `kind`.

    Raises:
        ValueError: A key is unknown or missing, or the dataclass rejects a value.
    """
    unknown = [name for name in content if name not in kind.__dataclass_fields__]
    if unknown:
        meant = did_you_mean(unknown[0], kind.__dataclass_fields__) or "; remove it"
        raise ValueError(f"{kind.__name__} has no field {shown(unknown[0])}{meant}")
    for field in fields(kind):
        if field.default is field.default_factory is MISSING and field.name not in content:
            raise ValueError(f"{field.name} is missing; {kind.__name__} requires it")
    return kind(**content)


def converted(name: str, value: Any, hint: Any) -> Any:
    """Converts a value to the type of an annotation.

    Args:
        name: The field's name, for the error message.
        value: The value.
        hint: The annotation.

    Raises:
        ValueError: The value does not have a type that the annotation allows.
    """
    found = _convert(name, value, hint)
    if found is _MISMATCH:
        raise ValueError(f"{name} is {shown(value)}; it must be {_words(hint)}")
    return found


def shown(value: Any) -> str:
    """Returns the `repr` of a value for a message, on one line of at most 81 characters."""
    if isinstance(value, int) and abs(value) >= 10**_MOST_SHOWN:
        return f"a number of {math.ceil(value.bit_length() * math.log10(2))} digits"
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):
        # `repr` fails for deeply nested values and for integers with too many digits.
        text = kind_of(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Converts a value to the annotation's type, or returns _MISMATCH if its type is wrong."""
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        # The value is a NumPy or JAX scalar.
        value = value.item()
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
    """Returns the entry of `choices` that equals the value, or _MISMATCH.

    A NumPy or JAX dtype is compared by its name.
    """
    if not isinstance(value, str | int | None):
        value = getattr(value, "name", getattr(value, "__name__", value))
    return next((x for x in choices if type(x) is type(value) and x == value), _MISMATCH)


def _sequence(name: str, value: Any, hints: tuple) -> Any:
    """Converts a list or tuple to the type `tuple[hints]`, or returns _MISMATCH."""
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
        return f"a list in which each entry is {_words(inner[0])}"
    if kind is dict:
        return f"an object in which each value is {_words(inner[1])}"
    if kind in (Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    return _WORDS.get(hint, f"an object ({hint.__name__})")


def check_at_least(least: int, config: "DataclassInstance", *names: str) -> None:
    """Checks that fields, and entries of per-layer tuples, are whole numbers of at least `least`.

    None is accepted for fields whose default is None.

    Args:
        least: The smallest accepted value.
        config: The dataclass instance; NumPy integers in its fields become Python integers.
        *names: Names of the fields to check.

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
    """Checks that fields with a pattern (a tuple with an entry per layer) are not empty."""
    for name in names:
        if getattr(config, name) == ():
            raise ValueError(f"{name} is empty; a pattern must have at least one entry")


def entries(value: Any) -> tuple:
    """Returns the entries of a pattern; a single value becomes a tuple with one entry."""
    return value if isinstance(value, tuple) else (value,)


def whole_number(name: str, value: Any, least: int) -> int:
    """Converts a whole number to a Python int; raises ValueError if it is below `least`."""
    # This also rejects NumPy's bool, which old versions of NumPy convert to an index.
    is_flag = type(value).__name__ == "bool"
    if is_flag or not hasattr(value, "__index__") or index(value) < least:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number of at least {least}")
    return index(value)


def check_positive(config: "DataclassInstance", *names: str) -> None:
    """Checks that fields, and entries of per-layer tuples, are above 0 and finite.

    None is accepted as an entry of a per-layer tuple, and for fields whose default is None.

    Args:
        config: The dataclass instance.
        *names: Names of the fields to check.

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


def check_finite(config: "DataclassInstance", *names: str) -> None:
    """Raises ValueError if a field is infinite or NaN."""
    for name in names:
        if not math.isfinite(getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be finite")


def check_fraction(config: "DataclassInstance", *names: str) -> None:
    """Raises ValueError if a field is not in [0, 1)."""
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be in [0, 1)")
