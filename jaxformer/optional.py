"""Import of optional packages, which the extras in pyproject.toml install."""

from importlib import import_module
from types import ModuleType


def install_line(extra: str) -> str:
    """Returns the command that installs an extra from a clone of the repository."""
    return f"pip install -e '.[{extra}]'"


def import_optional(module: str, purpose: str, extra: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        module: The name of the module.
        purpose: The task that needs the module, such as "read FILE".
        extra: The extra that installs the package.

    Raises:
        ValueError: The package is missing. The message contains the install command.
    """
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ValueError(f"to {purpose}, install {name}: {install_line(extra)}") from None
