"""Checks of the arguments of public functions, before any computation."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from operator import index
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from jaxtyping import Float, Shaped, jaxtyped

from jaxformer.functional.taps import TapFunction

_ArrayHint = type(Float[Any, ""])
_ARRAY: Any = Shaped[Any, "..."]
_WHOLE = (int, np.integer)
_ALSO: dict[Any, tuple[Any, ...]] = {
    float: (Real, Shaped[Any, ""]),  # a number may be traced
    int: _WHOLE,
    bool: (bool, np.bool_),
}
_WORDS = {float: "a number", int: "a whole number", bool: "True or False", str: "a word"}


def checks_arguments(
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that checks the arguments of a function.

    Arrays must have the annotated dtype and shape, in which each name stands for one size. Numbers,
    flags and words must have the annotated type; a number may be an array without axes. Compiled
    functions are checked only while they are traced.

    The decorated function raises ValueError if the dtype or shape of an array does not fit, and
    TypeError if an argument has another type.

    Args:
        check: called last with all arguments by name, for conditions that annotations cannot
            express.
    """
    return functools.partial(_checked, check)


def _checked(check: Callable[..., None] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    hints = {
        name: _alternatives(parameter.annotation)
        for name, parameter in signature.parameters.items()
        if parameter.annotation not in (parameter.empty, Any, TapFunction)
        and get_origin(parameter.annotation) is not Mapping  # weights, which `check` looks at
    }
    accepted = {name: _types(alternatives) for name, alternatives in hints.items()}

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        bound, fitting = signature.bind(*arguments, **named), []
        values = bound.arguments
        with jaxtyped("context"):
            for name in filter(values.__contains__, hints):
                value, types = values[name], accepted[name]
                is_flag = isinstance(value, bool) and bool not in types
                if is_flag or not isinstance(value, types):
                    raise _refusal(name, value, hints[name], fitting)
                if isinstance(hints[name][0], _ArrayHint) and value is not None:
                    fitting.append(f"{name} {_form(value)} as {_words(hints[name][0])}")
        if check is not None:
            bound.apply_defaults()
            check(**bound.arguments)
        return function(*arguments, **named)

    return checked


def check_choice(name: str, value: object, accepted: Collection[str]) -> None:
    """Raises ValueError unless the value is one of the accepted words."""
    if value not in tuple(accepted):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(accepted)}")


def whole_number(name: str, value: object, least: int) -> int:
    """Returns the value as an int. Raises ValueError below `least`, TypeError for another type."""
    if not isinstance(value, _WHOLE) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if index(value) < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return index(value)


def check_positive(name: str, value: object) -> None:
    """Raises ValueError for a number that is not above 0; accepts every traced value."""
    if isinstance(value, Real) and not float(value) > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")


def check_maps(name: str, weights: object, sizes: dict[str, tuple[int | None, int | None]]) -> None:
    """Checks that a dictionary of weights holds affine maps with the given (inputs, outputs).

    Args:
        name: the name of the dictionary in error messages.
        weights: {map: {"kernel": [inputs, outputs], …}}.
        sizes: (inputs, outputs) of each required map; None stands for any size.

    Raises:
        ValueError: a map or its kernel is missing, or has another shape.
        TypeError: the weights are not a dictionary.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name} is a {type(weights).__name__}; it must be a dictionary of maps")
    for key, wanted in sizes.items():
        kernel = weights.get(key)
        kernel = kernel.get("kernel") if isinstance(kernel, Mapping) else None
        if kernel is None:
            raise ValueError(f"{name} has no kernel at {name}[{key!r}]['kernel']")
        shape = tuple(kernel.shape)
        fits = len(shape) == 2 and all(
            want in (None, size) for want, size in zip(wanted, shape, strict=True)
        )
        if not fits:
            form = ", ".join("any" if want is None else str(want) for want in wanted)
            raise ValueError(f"{name}[{key!r}]['kernel'] is {shape}; it must be [{form}]")


def _alternatives(annotation: Any) -> tuple:
    """Returns the types that an annotation allows; arrays may be NumPy arrays."""
    is_union = get_origin(annotation) in (Union, UnionType)
    found = get_args(annotation) if is_union else (annotation,)
    return tuple(x.dtype[Any, x.dim_str] if isinstance(x, _ArrayHint) else x for x in found)


def _types(alternatives: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the types for isinstance; those of numbers and flags include NumPy's."""
    return tuple(kind for hint in alternatives for kind in _ALSO.get(hint, (hint,)))


def _is_array(value: object) -> bool:
    return isinstance(value, _ARRAY)


def _refusal(name: str, value: object, hints: tuple, fitting: list[str]) -> Exception:
    accepted = " or ".join(map(_words, hints))
    where = f", with {', '.join(fitting)}" if fitting else ""
    if _is_array(value) and any(isinstance(hint, _ArrayHint) for hint in hints):
        return ValueError(f"{name} is {_form(value)}; it must be {accepted}{where}")
    what = _form(value) if _is_array(value) else f"a {type(value).__name__}"
    return TypeError(f"{name} is {what}; it must be {accepted}{where}")


def _form(array: Any) -> str:
    kind = getattr(array, "dtype", type(array).__name__)  # a kernel value has no dtype
    return f"{kind} [{', '.join(map(str, array.shape))}]"


def _words(hint: Any) -> str:
    if isinstance(hint, _ArrayHint):
        dtype = {"Shaped": "an array"}.get(hint.dtype.__name__, hint.dtype.__name__.lower())
        return f"{dtype} [{', '.join(hint.dim_str.split())}]"
    if hint is type(None):
        return "None"
    return _WORDS.get(hint, f"a {hint.__name__}")
