"""Imports a user's classes and functions by name, such as "my_parts:squared_relu".

Importing a module runs its code. Callers must therefore pass only names that the user has typed, or
names from a folder that the user trusts.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any, Literal

from jaxformer.models.config.check import shown
from jaxformer.terminal import did_you_mean

_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def check_name(what: str, name: str) -> None:
    """Raises ValueError unless a name has the form MODULE:FUNCTION.

    Args:
        what: The name of the value, for the error message.
        name: The name to check.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} is {shown(name)}; it must be MODULE:FUNCTION, such as my_parts:squared_relu"
        )


def import_named(kind: Literal["class", "function"], name: str, where: str) -> Any:
    """Imports a class or a function by its name.

    As with `python -m`, modules in the current directory precede the Python path.

    Args:
        kind: What the name must refer to. A function may also be a callable object.
        name: The name, MODULE:NAME.
        where: The name of the value, for error messages.

    Raises:
        ValueError: The module cannot be imported, or does not have a class or function of this
            name.
    """
    check_name(where, name)
    module_name, _, plain = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(where, name, module_name, error) from error
        meant = did_you_mean(module_name, (x.name for x in iter_modules()))
        raise ValueError(
            f"{where} is {name}, but there is no module {module_name!r} in the current directory "
            f"or on the Python path{meant}"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(where, name, module_name, error) from error
    try:
        found = attrgetter(plain)(module)
    except AttributeError:
        meant = did_you_mean(plain, vars(module))
        raise ValueError(
            f"{where} is {name}, but the module {module_name} has no {kind} {plain!r}{meant}"
        ) from None
    if not callable(found) or isinstance(found, type) != (kind == "class"):
        raise ValueError(f"{where} is {name}, which is {shown(found)}; it must be a {kind}")
    return found


def _failed(where: str, name: str, module: str, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {error}"
    return ValueError(f"{where} is {name}, but importing the module {module} failed: {reason}")


def foreign_names(content: Any) -> Iterator[str]:
    """Yields the names of the user's classes and functions in the result of `values.to_json`."""
    if isinstance(content, list):
        for entry in content:
            yield from foreign_names(entry)
    elif isinstance(content, dict):
        names = (content.get(x) for x in ("class", "function"))
        yield from (name for name in names if isinstance(name, str) and ":" in name)
        for entry in content.values():
            yield from foreign_names(entry)
