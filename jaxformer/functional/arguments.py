"""Argument checks of public functions: dtypes, shapes and types."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from operator import index
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np
from jaxtyping import Float, Shaped, jaxtyped

from jaxformer.terminal import did_you_mean, kind_of, with_article

P = ParamSpec("P")
R = TypeVar("R")
_ArrayHint = type(Float[Any, ""])
_ARRAY: Any = Shaped[Any, "..."]
_WHOLE = (int, np.integer)
_ALSO: dict[Any, tuple[Any, ...]] = {
    float: (Real, Shaped[Any, ""]),  # A traced number is a scalar array.
    int: _WHOLE,
    bool: (bool, np.bool_),
}
# {name of an argument in the lecture notes or in another library: jaxformer's name}.
_OTHER_NAMES = {
    **dict.fromkeys(("gamma", "weight"), "scale"),
    "beta": "bias",
    **dict.fromkeys(("eps", "variance_epsilon"), "epsilon"),
    **dict.fromkeys(("attn_mask", "attention_mask"), "mask"),
    **dict.fromkeys(("q", "Q"), "query"),
    **dict.fromkeys(("k", "K"), "key"),
    **dict.fromkeys(("v", "V"), "value"),
    **dict.fromkeys(("heads", "n_heads", "num_attention_heads"), "num_heads"),
    **dict.fromkeys(("act", "activation_function", "nonlinearity"), "activation"),
    **dict.fromkeys(("params", "parameters", "w"), "weights"),
    **dict.fromkeys(("inputs", "hidden_states"), "x"),
    **dict.fromkeys(("encoded", "memory", "encoder_hidden_states"), "source"),
    "labels": "targets",
}
_WORDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    str: "a string",
    Callable: "a function",
}


def checks_arguments(
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that checks the arguments of a function.

    Arrays must have the annotated dtype and shape. Axes with the same name must have the same size.
    Numbers, flags and strings must have the annotated type; a scalar array counts as a number. In
    compiled functions, the checks run only while tracing.

    The decorated function raises ValueError if the dtype or shape of an array does not fit, and
    TypeError if an argument has a wrong type.

    Args:
        check: a function for conditions that annotations cannot express. It is called after the
            other checks, with all arguments by keyword.
    """
    return functools.partial(_checked, check)


def _checked(check: Callable[..., None] | None, function: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(function)
    hints = {
        name: _alternatives(parameter.annotation)
        for name, parameter in signature.parameters.items()
        if _is_checked(parameter.annotation)
    }
    accepted = {name: _types(alternatives) for name, alternatives in hints.items()}

    @functools.wraps(function)
    def checked(*arguments: P.args, **named: P.kwargs) -> R:
        check_names(function.__name__, named, signature.parameters)
        bound, fitting = signature.bind(*arguments, **named), []
        values = bound.arguments
        with jaxtyped("context"):
            for name in filter(values.__contains__, hints):
                value, types = values[name], accepted[name]
                is_flag = isinstance(value, bool) and bool not in types
                if is_flag or not isinstance(value, types):
                    raise _refusal(name, value, hints[name], fitting)
                if isinstance(hints[name][0], _ArrayHint) and _is_array(value):
                    fitting.append(f"{name} {_form(value)} as {_words(hints[name][0])}")
        if check is not None:
            bound.apply_defaults()
            check(**bound.arguments)
        return function(*arguments, **named)

    return checked


def check_names(function: str, given: Collection[str], accepted: Collection[str]) -> None:
    """Raises TypeError if a call passes an argument that the function does not accept.

    The error suggests an accepted name, or lists all accepted names.

    Args:
        function: the name of the function.
        given: the names of the arguments of a call.
        accepted: the names of the parameters of the function.
    """
    for name in given:
        if name not in accepted:
            nearest = _OTHER_NAMES.get(name)
            if nearest in accepted:
                raise TypeError(f"{function}: `{name}` is called `{nearest}` here")
            hint = did_you_mean(name, accepted) or f"; it accepts {', '.join(accepted)}"
            raise TypeError(f"{function} has no argument `{name}`{hint}")


def check_choice(name: str, value: object, accepted: Collection[str]) -> None:
    """Raises ValueError unless `value` is in `accepted`."""
    if value not in tuple(accepted):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(accepted)}")


def whole_number(name: str, value: object, least: int) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: `value` is below `least`.
        TypeError: `value` is not a whole number.
    """
    if not isinstance(value, _WHOLE) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if index(value) < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return index(value)


def check_positive(name: str, value: object) -> None:
    """Raises ValueError if a number is not above 0; traced values are not checked."""
    if isinstance(value, Real) and not float(value) > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")


def check_maps(name: str, weights: object, sizes: dict[str, tuple[int | None, int | None]]) -> None:
    """Checks that a dictionary of weights contains linear layers with the given sizes.

    Args:
        name: the name of the dictionary in error messages.
        weights: {name of a layer: {"kernel": [inputs, outputs], …}}.
        sizes: (inputs, outputs) of each required layer; None allows any size.

    Raises:
        ValueError: A layer or its kernel is missing, or a kernel has a wrong shape.
        TypeError: `weights` is not a dictionary.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name} is {kind_of(weights)}; it must be a dictionary of linear layers")
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
            raise ValueError(
                f"{name}[{key!r}]['kernel'] has shape {shape}; the shape must be [{form}]"
            )


def _is_checked(annotation: Any) -> bool:
    """Returns whether `checks_arguments` checks an argument with this annotation.

    It does not check weights, literals, tuples and functions, but it checks an argument that may be
    a function or an array.
    """
    members = _members(annotation)
    kinds = {get_origin(x) for x in members}
    is_array = any(isinstance(x, _ArrayHint) for x in members)
    return (
        annotation not in (inspect.Parameter.empty, Any)
        and not kinds & {Mapping, Literal, tuple}
        and (is_array or Callable not in kinds)
    )


def _alternatives(annotation: Any) -> tuple:
    """Returns the types that an annotation allows; array types also accept NumPy arrays."""
    found = _members(annotation)
    found = (Callable if get_origin(x) is Callable else x for x in found)
    return tuple(x.dtype[Any, x.dim_str] if isinstance(x, _ArrayHint) else x for x in found)


def _members(annotation: Any) -> tuple:
    """Returns the members of a union, or the annotation itself."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _types(alternatives: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the types for `isinstance`, which include NumPy's numbers and booleans."""
    return tuple(kind for hint in alternatives for kind in _ALSO.get(hint, (hint,)))


def _is_array(value: object) -> bool:
    return isinstance(value, _ARRAY)


def _refusal(name: str, value: object, hints: tuple, fitting: list[str]) -> Exception:
    accepted = " or ".join(dict.fromkeys(map(_words, hints)))
    where = f", given {', '.join(fitting)}" if fitting else ""
    if _is_array(value) and any(isinstance(hint, _ArrayHint) for hint in hints):
        return ValueError(f"{name} is {_form(value)}; it must be {accepted}{where}")
    what = _form(value) if _is_array(value) else kind_of(value)
    return TypeError(f"{name} is {what}; it must be {accepted}{where}")


def _form(array: Any) -> str:
    # An instance of the class `Kernel` has a shape, but no dtype.
    kind = getattr(array, "dtype", type(array).__name__)
    return f"{kind} [{', '.join(map(str, array.shape))}]"


def _words(hint: Any) -> str:
    if isinstance(hint, _ArrayHint):
        dtype = {"Shaped": "an array"}.get(hint.dtype.__name__, hint.dtype.__name__.lower())
        return f"{dtype} [{', '.join(hint.dim_str.split())}]"
    if hint is type(None):
        return "None"
    return _WORDS.get(hint, with_article(hint.__name__))
