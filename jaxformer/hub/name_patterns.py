"""Regular expressions that a file of unknown origin matches against names.

`re` takes exponential time on some expressions, such as "(a+)+$". The functions here take
polynomial time: for each part of an expression they compute the set of all positions at which a
match of it can end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from re import _compiler, _parser  # pyrefly: ignore  # private, but the only parser of the syntax
from re import _constants as op  # pyrefly: ignore
from typing import Any, Union

_LONGEST, _DEEPEST = 2_000, 50
_SIMPLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT)  # one character, or a place
_Parts = tuple[Union["re.Pattern[str]", "_Choice", "_Repeat"], ...]


@dataclass(frozen=True, eq=False)
class _Choice:
    """Part of an expression that matches what one of the branches matches."""

    branches: tuple[_Parts, ...]


@dataclass(frozen=True, eq=False)
class _Repeat:
    """Part of an expression that matches `least` to `most` repeats of other parts."""

    least: int
    most: int
    parts: _Parts


def check_pattern(pattern: str) -> None:
    """Raises ValueError if `pattern` is no regular expression or uses an unsupported construct.

    Look-around, references to groups, possessive repeats and flags are not supported.
    """
    _parsed(pattern)


def fully_matches(pattern: str, name: str) -> bool:
    """Returns whether a regular expression matches the whole name, as `re.fullmatch` does.

    Raises:
        ValueError: As in `check_pattern`.
    """

    @cache
    def ends(parts: _Parts, start: int) -> frozenset[int]:
        """Returns all positions at which a match of the parts from `start` can end."""
        positions = frozenset([start])
        for part in parts:
            positions = frozenset[int]().union(*(ends_of_part(part, x) for x in positions))
        return positions

    def ends_of_all(parts: _Parts, starts: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(ends(parts, start) for start in starts))

    @cache
    def ends_of_part(part: Any, start: int) -> frozenset[int]:
        if isinstance(part, re.Pattern):
            found = part.match(name, start)
            return frozenset([found.end()] if found else [])
        if isinstance(part, _Choice):
            return frozenset[int]().union(*(ends(branch, start) for branch in part.branches))
        limit = len(name) + 1  # more repeats than characters match nothing that is not empty
        new = frozenset([start])
        for _ in range(min(part.least, limit)):
            new = ends_of_all(part.parts, new)
        reached = new
        for _ in range(min(part.most - part.least, limit)):
            new = ends_of_all(part.parts, new) - reached
            reached |= new
        return reached

    return len(name) in ends(_parsed(pattern), 0)


@cache
def _parsed(pattern: str) -> _Parts:
    if len(pattern) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} characters")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if parsed.state.flags != re.UNICODE.value:
        raise ValueError("flags are not supported")
    return _parts(parsed, depth=0)


def _parts(parsed: _parser.SubPattern, depth: int) -> _Parts:
    """Returns the parts of a parsed expression. `re` compiles each simple part."""
    if depth > _DEEPEST:
        raise ValueError(f"its groups are nested more than {_DEEPEST} deep")
    parts: list[re.Pattern[str] | _Choice | _Repeat] = []
    for kind, value in parsed:
        if kind is op.BRANCH:
            parts.append(_Choice(tuple(_parts(branch, depth + 1) for branch in value[1])))
        elif kind is op.SUBPATTERN and value[1:3] == (0, 0):
            parts.append(_Choice((_parts(value[3], depth + 1),)))
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            parts.append(_Repeat(value[0], value[1], _parts(value[2], depth + 1)))
        elif kind in _SIMPLE:
            alone = _parser.SubPattern(parsed.state, [(kind, value)])
            parts.append(_compiler.compile(alone))
        else:
            raise ValueError(f"it uses {str(kind).lower()}, which is not supported")
    return tuple(parts)
