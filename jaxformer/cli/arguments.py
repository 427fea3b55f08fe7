"""Parser of the command line: it fills in the dataclass of a verb's arguments."""

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jaxformer.cli.flags import (
    Flag,
    field_values,
    flags_of,
    is_section,
    key_of,
    read_value,
    value_in,
)
from jaxformer.cli.help import asks_for_help, help_text, usage_of
from jaxformer.models.config.needs import Need, check_read
from jaxformer.terminal import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_FLAG = re.compile(r"(?!-inf$)-+[A-Za-z][\w-]*(=.*)?", re.DOTALL)  # no number, and no text


def parse(kind: type[T], verb: str, argv: list[str]) -> T:
    """Returns an instance of the dataclass `kind`.

    A field of a nested dataclass becomes a flag without a prefix.

    Args:
        kind: The dataclass of the arguments.
        verb: The name of the verb.
        argv: The words after the verb. --help and --help-all print the flags and exit.

    Raises:
        ValueError: The words cannot be parsed, or nothing would read a flag.
    """
    return complete(kind, read_given(kind, verb, argv))


def read_given(
    kind: type, verb: str, argv: list[str], default: object = None, main: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the values of the arguments that a command line gives, by key.

    Args:
        kind: The dataclass of the arguments.
        verb: The name of the verb.
        argv: The words after the verb. --help and --help-all print the flags and exit.
        default: An instance whose values are the defaults; None: the defaults of the class.
        main: The flags that --help lists; (): all flags.

    Raises:
        ValueError: A flag is unknown, lacks its value or has a wrong one, or a word is missing.
    """
    flags = flags_of(kind, default)
    if asks_for_help(argv):
        say(help_text(kind, verb, flags, "--help-all" in argv, main))
        raise SystemExit(0)
    line = split(flags, argv)
    if line.unknown:
        raise ValueError(_about_unknown(line.unknown, flags, verb))
    words = line.given | _positional(verb, flags, line.others)
    for flag in flags:
        if flag.is_required and flag.key not in words:
            raise ValueError(f"{flag.name.rstrip('…')} is missing; give {flag.text}")
    return values_of(flags, words)


class Line(NamedTuple):
    """The words of a command line."""

    given: dict[str, list[str]]  # those of each known flag, by key
    others: list[str]  # those that belong to no flag
    unknown: list[str]  # unknown flags


def split(flags: list[Flag], argv: list[str]) -> Line:
    """Splits a command line into flags with their words, and other words.

    A word that starts with - and a letter is a flag, unless it has a space. Its value is the next
    word, or follows an equals sign. All words after -- belong to no flag.

    Args:
        flags: The known flags.
        argv: The words after the verb.

    Raises:
        ValueError: A known flag lacks its value, or has one although it takes none.
    """
    known = {name: flag for flag in flags if not flag.is_positional for name in flag.names}
    line, words = Line({}, [], []), deque(argv)
    while words and (word := words.popleft()) != "--":
        is_flag = _FLAG.fullmatch(word) is not None
        # A word such as -oFILE.png has a value without an equals sign.
        name, equals, value = word.partition("=") if is_flag else (word[:2], "=", word[2:])
        if (flag := known.get(name.replace("_", "-"))) is None:
            (line.unknown if is_flag else line.others).append(name if is_flag else word)
            continue
        following = _words_of(flag, name, [value] * bool(equals), words)
        repeated = line.given.get(flag.key, []) if flag.spelling.is_repeated else []
        line.given[flag.key] = repeated + following
    line.others.extend(words)
    return line


def _words_of(flag: Flag, name: str, attached: list[str], words: deque[str]) -> list[str]:
    """Returns the words of a flag's value: `attached`, and those that it removes from `words`."""
    if flag.hint is bool:
        if attached:
            raise ValueError(f"{name} is {attached[0]!r}; it takes no value")
        return [str(name.replace("_", "-") != flag.names[-1] or len(flag.names) == 1)]
    following = list(attached)
    while words and words[0] != "--" and not _FLAG.fullmatch(words[0]):
        if following and not flag.takes_several:
            break
        following.append(words.popleft())
    if following or flag.takes_several:
        return following
    dash = f"; a value that starts with - is written {name}={words[0]}" if words else ""
    raise ValueError(f"{name} has no value; give {name} {flag.placeholder}{dash}")


def _positional(verb: str, flags: list[Flag], words: list[str]) -> dict[str, list[str]]:
    """Returns the words of each positional argument; raises ValueError if some are left."""
    given, left = {}, deque(words)
    for flag in flags:
        if flag.is_positional and left:
            number = len(left) if flag.takes_several else 1
            given[flag.key] = [left.popleft() for _ in range(number)]
    if left:
        raise ValueError(f"unexpected word {left[0]!r}; usage: {usage_of(verb, flags)}")
    return given


def _about_unknown(names: list[str], flags: list[Flag], verb: str) -> str:
    """Returns a message about unknown flags, with the known flags that resemble them."""
    known = [name for flag in flags if not flag.is_positional for name in flag.names]
    alike = {x: "--" + x.lstrip("-").replace("_", "-").lower() for x in names}
    close = {x: get_close_matches(alike[x], known, n=1, cutoff=0.75) for x in names}
    meant = [f"{name}; did you mean {found[0]}?" for name, found in close.items() if found]
    told = " ".join(meant) or f"{', '.join(names)}; jaxformer {verb} --help-all lists the options"
    return f"unknown option {told}"


def values_of(flags: list[Flag], words: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns the values of the flags that have words; raises ValueError for a wrong word."""
    known = {flag.key: flag for flag in flags}
    return {key: read_value(known[key].name, known[key].hint, words[key]) for key in words}


def complete(kind: type[T], given: Mapping[str, Any], default: T | None = None) -> T:
    """Returns an instance of a dataclass with the given values.

    Args:
        kind: The dataclass.
        given: Values by key, also those of nested dataclasses.
        default: An instance with the remaining values; None: the defaults of the class.

    Raises:
        ValueError: The dataclass refuses a value, or nothing would read it.
    """
    arguments = _filled(kind, given, default)
    refuse_unread(arguments, given)
    return arguments


def _filled(kind: type[T], given: Mapping[str, Any], default: object) -> T:
    values = {}
    for field in fields(kind):
        value = value_in(default, field)
        if is_section(value):
            values[field.name] = _filled(type(value), given, value)
        else:
            values[field.name] = given.get(key_of(kind, field.name), value)
    return kind(**values)


def refuse_unread(arguments: object, given: Collection[str]) -> None:
    """Checks that something reads each argument of a command line.

    Args:
        arguments: The dataclass. Its property `implied`, if it has one, adds values by name.
        given: The keys of the arguments that the command line gives.

    Raises:
        ValueError: A condition (`needs`) of such an argument does not hold.
    """
    flags = flags_of(type(arguments), arguments)
    needs: dict[str, tuple[Need, ...]] = {}
    for group in dict.fromkeys(flag.group for flag in flags):
        for name, conditions in getattr(group, "needs", {}).items():
            needs[name] = (*needs.get(name, ()), *conditions)
    values = field_values(arguments) | getattr(arguments, "implied", {})
    check_read(needs, values, given)
