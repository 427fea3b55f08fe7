"""Changes that turn what a bug's target is into what it must not be.

A change is a function: it takes the target (a function, which may stand under decorators, or the
value of an assignment) and gives what stands in its place. Where the bug is in the middle of a
function, it is a `Replace` in that function's own syntax.
"""

from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature
from types import FunctionType


@dataclass(frozen=True)
class Replace:
    """Within the target `old`, an expression or whole statements, stands exactly once; there `new`
    is put."""

    old: str
    new: str


def gives(value):
    """A function that does nothing and gives this value."""
    return lambda function: lambda *_, **__: value


def then(change):
    """What a function gives, changed."""
    return lambda function: lambda *args, **named: change(function(*args, **named))


def without(*keys):
    """A table that lacks these keys."""
    return lambda table: {key: value for key, value in table.items() if key not in keys}


def changed(change, original):
    """What `change` makes of the original; TypeError if that is called in another way, which would
    turn any test red."""
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
