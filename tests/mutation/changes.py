"""Changes that break the target of a bug.

A change is a function from the sound target to the broken one. The target is a function, possibly
below decorators, or the value of an assignment. A bug in the middle of a function is a `Replace`
in its syntax tree.
"""

from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature
from types import FunctionType


@dataclass(frozen=True)
class Replace:
    """Replaces `old` by `new`. `old`, an expression or statements, occurs once in the target."""

    old: str
    new: str


def gives(value):
    """Returns a change to a function that only returns `value`."""
    return lambda function: lambda *_, **__: value


def then(change):
    """Returns a change that applies `change` to the result of a function."""
    return lambda function: lambda *args, **named: change(function(*args, **named))


def without(*keys):
    """Returns a change that removes these keys from a table."""
    return lambda table: {key: value for key, value in table.items() if key not in keys}


def changed(change, original):
    """Applies a change and checks the signature.

    Raises:
        TypeError: the broken function takes other parameters, which would fail any test.
    """
    broken = change(original)
    if not isinstance(original, FunctionType):
        return broken
    known, taken = (_parameters(function) for function in (original, broken))
    if taken != known and not any(kind is kind.VAR_POSITIONAL for _, kind, _ in taken):
        raise TypeError(f"{original.__qualname__} takes {known}; its broken form takes {taken}")
    return update_wrapper(broken, original)


def _parameters(function):
    each = signature(function).parameters.values()
    return [(x.name, x.kind, x.default is x.empty) for x in each]
