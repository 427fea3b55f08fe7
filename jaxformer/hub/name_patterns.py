"""Safe matching of regular expressions from untrusted files.

`re` takes exponential time on some expressions, such as "(a+)+$". `fully_matches` takes polynomial
time. The function splits an expression into consecutive parts. For each part, the function computes
all positions in the name where a match of the part can end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

# These modules are private, but no public module parses regular expressions.
from re import _compiler, _parser  # pyrefly: ignore
from re import _constants as op  # pyrefly: ignore
from typing import Any, Union

_LONGEST, _DEEPEST = 2_000, 50
# Operators that match one character or, for AT, a position such as the end of a module's name.
_SIMPLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.AT)
_Parts = tuple[Union["re.Pattern[str]", "_Choice", "_Repeat"], ...]


@dataclass(frozen=True, eq=False)
class _Choice:
    """Part of an expression that matches one of several branches."""

    branches: tuple[_Parts, ...]


@dataclass(frozen=True, eq=False)
class _Repeat:
    """Part of an expression that matches the sequence `parts`, repeated `least` to `most` times."""

    least: int
    most: int
    parts: _Parts


def check_pattern(pattern: str) -> None:
    """Raises ValueError if `pattern` is not a regular expression or uses an unsupported feature.

    Look-around, backreferences, possessive quantifiers and flags are not supported.
    """
    _parsed(pattern)


def fully_matches(pattern: str, name: str) -> bool:
    """Returns whether a regular expression matches the whole name, as `re.fullmatch` does.

    Raises:
        ValueError: `pattern` is not a regular expression or uses an unsupported feature.
    """

    @cache
    def ends(parts: _Parts, start: int) -> frozenset[int]:
        """Returns the possible end positions of a match of `parts` from `start` on."""
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
        # A repetition without characters reaches no new position, so no position needs more than
        # len(name) repetitions.
        limit = len(name) + 1
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
        raise ValueError(f"it is not a regular expression: {error}") from None
    if parsed.state.flags != re.UNICODE.value:
        raise ValueError("inline flags such as (?i) are not supported")
    return _parts(parsed, depth=0)


def _parts(parsed: _parser.SubPattern, depth: int) -> _Parts:
    """Splits a parsed expression into consecutive parts.

    A part is a `_Choice`, a `_Repeat` or, for a single character or a position, a compiled pattern.
    """
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
            raise ValueError(f"it uses the operator {str(kind).lower()}, which is not supported")
    return tuple(parts)
