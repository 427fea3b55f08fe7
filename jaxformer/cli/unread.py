"""Refusal of flags that nothing would read."""

from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from jaxformer.cli.help import argument_name
from jaxformer.models.config.needs import Need, check_read
from jaxformer.models.config.rotary import Scaling
from jaxformer.training.mesh_sizes import Mesh


def flags_in(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Returns the name of each flag, without the leading dashes, and the words after it."""
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    return flags


def given_in(argv: list[str], names: Collection[str]) -> list[str]:
    """Returns the names of the arguments that the flags of a command line set.

    Args:
        argv: The command line.
        names: The names of all arguments.
    """
    given = [name.replace("-", "_") for name, _ in flags_in(argv)]
    return [name if name in names else name.removeprefix("no_") for name in given]


def refuse_unread(arguments: Any, argv: list[str]) -> None:
    """Checks that something reads each flag of a command line.

    Args:
        arguments: The parsed dataclass. Its property `implied`, if it has one, adds values by name.
        argv: The words after the verb.

    Raises:
        ValueError: A condition (`needs`) of a flag does not hold.
    """
    sections = list(_sections(arguments))
    needs: dict[str, tuple[Need, ...]] = {}
    for section in sections:
        for name, conditions in getattr(section, "needs", {}).items():
            needs[name] = (*needs.get(name, ()), *conditions)
    values = {name: x for section in sections for name, x in _values(section)}
    values |= getattr(arguments, "implied", {})
    check_read(needs, values, given_in(argv, values))


def _sections(arguments: Any) -> Iterator[Any]:
    """Yields a dataclass and the dataclasses in its fields whose fields are flags."""
    yield arguments
    for field in fields(arguments):
        if _is_section(value := getattr(arguments, field.name)):
            yield from _sections(value)


def _values(section: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each argument of a dataclass, without inner dataclasses."""
    for field in fields(section):
        if not _is_section(value := getattr(section, field.name)):
            yield argument_name(type(section), field.name), value


def _is_section(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, Mesh | Scaling)
