"""What the configs refuse, each by the field's name, its value and what is accepted."""

from functools import cache
from numbers import Real
from operator import index
from typing import Literal, get_type_hints

type_hints = cache(get_type_hints)


def at_least(least: int, config, *names: str) -> None:
    """These fields are whole numbers of at least so much, or None where that is their default; a
    NumPy one becomes Python's, which JSON knows. A pattern is of such entries."""
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default

        def checked(entry, name=name, default=default):
            return None if entry is None is default else whole_number(name, entry, least)

        checked_value = tuple(map(checked, value)) if isinstance(value, tuple) else checked(value)
        object.__setattr__(config, name, checked_value)


def pattern(config, *names: str, kind=None) -> None:
    """These fields may be a tuple, the entries of successive layers, repeated over the depth. Lists
    and, for a dataclass `kind`, dictionaries, as JSON has them, become what they stand for."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, list | tuple):
            if not value:
                raise ValueError(f"{name} is empty; a pattern has an entry for at least one layer")
            value = tuple(_of_kind(entry, kind) for entry in value)
        object.__setattr__(config, name, _of_kind(value, kind))


def _of_kind(value, kind):
    return kind(**value) if kind is not None and isinstance(value, dict) else value


def entries(value) -> tuple:
    """The entries of a pattern, or the one that is the same in all layers."""
    return value if isinstance(value, tuple) else (value,)


def whole_number(name: str, value, least: int) -> int:
    """The value as Python's int; ValueError unless it is a whole number of at least so much."""
    if not hasattr(value, "__index__") or isinstance(value, bool) or index(value) < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return index(value)


def one_of(config) -> None:
    """Every field of a Literal type has one of its values; jnp.bfloat16 becomes its name."""
    for name, kind in type_hints(type(config)).items():
        accepted = getattr(kind, "__args__", ())
        is_choice = getattr(kind, "__origin__", None) is Literal
        if name == "dtype" and not isinstance(config.dtype, str):
            dtype = getattr(config.dtype, "name", getattr(config.dtype, "__name__", config.dtype))
            object.__setattr__(config, name, dtype if dtype in accepted else config.dtype)
        if is_choice and getattr(config, name) not in accepted:
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be one of {accepted}")


def positive(config, *names: str) -> None:
    """These fields are finite and above 0, or None where that is their default; so is each entry of
    a pattern, or it is None."""
    for name in names:
        given, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        may_be_none = isinstance(given, tuple) or default is None
        for value in entries(given):
            if not (_is_positive(value) or (value is None and may_be_none)):
                raise ValueError(f"{name} is {value!r}; it must be above 0, and finite")


def _is_positive(value) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0.0 < value < float("inf")


def fraction(config, *names: str) -> None:
    """These fields are in [0, 1)."""
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be in [0, 1)")
