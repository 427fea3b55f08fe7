"""What the configs refuse, each by the field's name, its value and what is accepted."""

from functools import cache
from operator import index
from typing import Literal, get_type_hints

type_hints = cache(get_type_hints)


def at_least(least: int, config, *names: str) -> None:
    """These fields are whole numbers of at least so much, or None where that is their default; a
    NumPy one becomes Python's, which JSON knows."""
    for name in names:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        if not value is None is default:
            object.__setattr__(config, name, whole_number(name, value, least))


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
    """These fields are finite and above 0."""
    for name in names:
        if not 0.0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be above 0, and finite")


def fraction(config, *names: str) -> None:
    """These fields are in [0, 1)."""
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be in [0, 1)")
