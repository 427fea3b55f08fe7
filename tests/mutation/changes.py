"""Changes that break the target of a bug.

A change is a function from the sound target to the broken one. The target is a function, possibly
below decorators, or the value of an assignment. A bug in the middle of a function is a `Replace`
in its syntax tree. `names` of a change are names that the target must use.
"""

import builtins
from dataclasses import dataclass
from functools import update_wrapper
from inspect import signature, unwrap
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


def unchanged(function):
    """Replaces a function by one that returns its first argument."""
    return lambda first, *_, **__: first


def takes(**changes):
    """Returns a change to a function that applies a change to each of these arguments."""

    def replaced(function):
        def broken(*args, **named):
            call = signature(function).bind(*args, **named)
            call.apply_defaults()
            new = {name: change(call.arguments[name]) for name, change in changes.items()}
            call.arguments.update(new)
            return function(*call.args, **call.kwargs)

        return broken

    replaced.names = tuple(changes)
    return replaced


def inside(name, change):
    """Returns a change to a function that applies `change` to a name that the function uses.

    The name is one of the function's module or of Python, such as "split_key" or "min", or an
    attribute, such as "jnp.where". Other functions, even those that it calls, use the sound value.
    """
    first, *attributes = name.split(".")

    def replaced(function):
        sound = unwrap(function)  # without the checks of types that an import hook adds

        def broken(*args, **named):
            known = {**vars(builtins), **sound.__globals__}
            known[first] = _with_attribute(known[first], attributes, change)
            fields = sound.__name__, sound.__defaults__, sound.__closure__
            copied = FunctionType(sound.__code__, known, *fields)
            copied.__kwdefaults__ = sound.__kwdefaults__
            return copied(*args, **named)

        return broken

    replaced.names = (name,)
    return replaced


def _with_attribute(value, attributes, change):
    if not attributes:
        return change(value)
    first, *others = attributes
    return having(**{first: _with_attribute(getattr(value, first), others, change)})(value)


def having(**attributes):
    """Returns a change to an object that gives other values to some of its attributes."""
    return lambda sound: _Having(sound, attributes)


class _Having:
    def __init__(self, sound, attributes):
        self._sound = sound
        vars(self).update(attributes)

    @property
    def __class__(self):  # for isinstance
        return type(self._sound)

    def __getattr__(self, name):
        return getattr(self._sound, name)


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
