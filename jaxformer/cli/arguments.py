"""Command line parser, which fills in the dataclass of a subcommand's arguments."""

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jaxformer.cli.flags import (
    Flag,
    field_values,
    flag_key,
    is_section,
    list_flags,
    read_value,
    value_in,
)
from jaxformer.cli.help import asks_for_help, format_usage, help_text
from jaxformer.models.config.needs import Need, check_read
from jaxformer.terminal import did_you_mean, say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
# The pattern matches flags, but neither negative numbers nor texts with spaces.
_FLAG = re.compile(r"(?!-inf$)-+[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def parse(kind: type[T], verb: str, argv: list[str]) -> T:
    """Parses a command line into an instance of the dataclass `kind`.

    A field of a nested dataclass becomes a flag without a prefix.

    Args:
        kind: The dataclass of the arguments.
        verb: The name of the subcommand.
        argv: The command-line arguments after the subcommand. --help and --help-all print the
            flags and exit.

    Raises:
        ValueError: The command line cannot be parsed or a flag would have no effect.
    """
    return complete(kind, read_given(kind, verb, argv))


def read_given(
    kind: type, verb: str, argv: list[str], default: object = None, main: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns {key: value} for the arguments that a command line sets.

    Args:
        kind: The dataclass of the arguments.
        verb: The name of the subcommand.
        argv: The command-line arguments after the subcommand. --help and --help-all print the
            flags and exit.
        default: An instance of `kind` that provides the defaults. If None, the fields' own defaults
            apply.
        main: The flags that --help lists. If empty, --help lists all flags.

    Raises:
        ValueError: a flag is unknown, has a missing or invalid value, or an argument is missing.
    """
    flags = list_flags(kind, default)
    if asks_for_help(argv):
        say(help_text(kind, verb, flags, "--help-all" in argv, main))
        raise SystemExit(0)
    line = split(flags, argv)
    if line.unknown:
        raise ValueError(_about_unknown(line.unknown, flags, verb))
    left = [flag for flag in flags if flag.is_positional and flag.key not in line.given]
    words = line.given | _positional(left, line.others, format_usage(verb, flags))
    for flag in flags:
        if flag.is_required and flag.key not in words:
            raise ValueError(f"{flag.name.rstrip('…')} is missing; give {flag.text}")
    return read_values(flags, words)


class Line(NamedTuple):
    """The words of a command line (the strings of `argv`), grouped by flag.

    Attributes:
        given: The words of each known flag's value, by the flag's key.
        others: The words that do not belong to a flag.
        unknown: The unknown flags.
    """

    given: dict[str, list[str]]
    others: list[str]
    unknown: list[str]


def split(flags: list[Flag], argv: list[str]) -> Line:
    """Assigns each word of a command line to a flag or to the other words.

    A word that starts with - and a letter is a flag, unless it contains a space. The value of a
    flag is the next word, or the text after an equals sign. Words after -- never belong to a flag.
    A positional argument may also be written as a flag: `--prompt TEXT`.

    Args:
        flags: The known flags.
        argv: The command-line arguments after the subcommand.

    Raises:
        ValueError: a flag lacks its value, or a flag that takes no value has one.
    """
    given, rest = take(flags, argv)
    line, words = Line(given, [], []), deque(rest)
    while words and (word := words.popleft()) != "--":
        is_flag = _FLAG.fullmatch(word) is not None
        (line.unknown if is_flag else line.others).append(word.split("=")[0] if is_flag else word)
    line.others.extend(words)
    return line


def take(flags: list[Flag], argv: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns {flag key: words of the flag's value} for the known flags, and all other words.

    Args:
        flags: The known flags.
        argv: The command-line arguments after the subcommand.

    Raises:
        ValueError: a flag lacks its value, or a flag that takes no value has one.
    """
    known, given, rest, words = _by_name(flags), {}, [], deque(argv)
    while words and (word := words.popleft()) != "--":
        is_flag = _FLAG.fullmatch(word) is not None
        # In a word such as -oFILE.png, the value follows the flag without an equals sign.
        name, equals, value = word.partition("=") if is_flag else (word[:2], "=", word[2:])
        if (flag := known.get(name.replace("_", "-"))) is None:
            rest.append(word)
            continue
        following = _take_words(flag, name, [value] * bool(equals), words)
        repeated = given.get(flag.key, []) if flag.spelling.is_repeated else []
        given[flag.key] = repeated + following
    return given, rest + ["--", *words] * bool(words)


def _take_words(flag: Flag, name: str, attached: list[str], words: deque[str]) -> list[str]:
    """Returns the words of a flag's value.

    Args:
        flag: The flag.
        name: The flag as it was written on the command line.
        attached: A list with the value after the equals sign, or an empty list without an equals
            sign.
        words: The words after the flag. The function removes the words of the flag's value from
            this deque.
    """
    if flag.hint is bool:
        if attached:
            raise ValueError(f"{name} is {attached[0]!r}; this flag does not accept a value")
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


def _by_name(flags: list[Flag]) -> dict[str, Flag]:
    """Returns the flag for each spelling that starts with a dash."""
    dashed = {f"--{flag.key.replace('_', '-')}": flag for flag in flags if flag.is_positional}
    return {name: flag for flag in flags for name in flag.names if name[0] == "-"} | dashed


def _positional(flags: list[Flag], words: list[str], usage: str) -> dict[str, list[str]]:
    """Returns the words of each positional argument; raises ValueError if words are left over."""
    given, left = {}, deque(words)
    for flag in flags:
        if left:
            number = len(left) if flag.takes_several else 1
            given[flag.key] = [left.popleft() for _ in range(number)]
    if left:
        raise ValueError(f"unexpected word {left[0]!r}; usage: {usage}")
    return given


def _about_unknown(names: list[str], flags: list[Flag], verb: str) -> str:
    """Returns an error message about unknown flags, with suggestions of similar flags."""
    alike = {x: "--" + x.lstrip("-").replace("_", "-").lower() for x in names}
    known = _by_name(flags)
    meant = [f"{name}{did_you_mean(alike[name], known)}" for name in names]
    told = " ".join(x for x in meant if x.endswith("?"))
    told = told or f"{', '.join(names)}; jaxformer {verb} --help-all lists the options"
    return f"unknown option {told}"


def read_values(flags: list[Flag], words: Mapping[str, list[str]]) -> dict[str, Any]:
    """Parses the words of each flag; raises ValueError for a word that is not a valid value."""
    known = {flag.key: flag for flag in flags}
    return {key: read_value(known[key].name, known[key].hint, words[key]) for key in words}


def complete(kind: type[T], given: Mapping[str, Any], default: T | None = None) -> T:
    """Returns an instance of a dataclass with the given values.

    Args:
        kind: The dataclass.
        given: Values by key, including the values of nested dataclasses.
        default: An instance of `kind` that provides the values missing from `given`. If None, the
            fields' own defaults apply.

    Raises:
        ValueError: The dataclass does not accept a value, or an argument has no effect.
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
            values[field.name] = given.get(flag_key(kind, field.name), value)
    return kind(**values)


def refuse_unread(arguments: object, given: Collection[str]) -> None:
    """Checks that every argument on the command line has an effect.

    Args:
        arguments: The dataclass instance. If the instance has a property `implied`, the conditions
            (`needs`) may also depend on the values in this property.
        given: The keys of the arguments on the command line.

    Raises:
        ValueError: The condition (`needs`) of an argument does not hold.
    """
    flags = list_flags(type(arguments), arguments)
    needs: dict[str, tuple[Need, ...]] = {}
    for group in dict.fromkeys(flag.group for flag in flags):
        for name, conditions in getattr(group, "needs", {}).items():
            needs[name] = (*needs.get(name, ()), *conditions)
    values = field_values(arguments) | getattr(arguments, "implied", {})
    check_read(needs, values, given)
