"""Regular expressions that a file of unknown origin matches against names.

`re` takes exponential time on some expressions, such as "(a+)+$". The functions here take
polynomial time: for each part of an expression they compute the set of all positions at which a
match of it can end.
"""

import re
from collections.abc import Iterable
from functools import cache
from re import _constants as op  # pyrefly: ignore  # private, but the only parser of the syntax
from re import _parser  # pyrefly: ignore
from typing import Any

_Kind = op._NamedIntConstant
_LONGEST, _DEEPEST = 2_000, 50
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_PLACES = {
    op.AT_BEGINNING: r"^",
    op.AT_BEGINNING_STRING: r"\A",
    op.AT_END: r"$",
    op.AT_END_STRING: r"\Z",
    op.AT_BOUNDARY: r"\b",
    op.AT_NON_BOUNDARY: r"\B",
}
_ONE_CHARACTER = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)


def check_pattern(pattern: str) -> None:
    """Raises ValueError if `pattern` is no regular expression or uses an unsupported construct.

    Look-around, references to groups, possessive repeats and flags are not supported.
    """
    fully_matches(pattern, "")


def fully_matches(pattern: str, name: str) -> bool:
    """Returns whether a regular expression matches the whole name, as `re.fullmatch` does.

    Raises:
        ValueError: As in `check_pattern`.
    """
    parsed = _parsed(pattern)
    return len(name) in _Matcher(name).ends(parsed, 0)


@cache
def _parsed(pattern: str) -> _parser.SubPattern:
    if len(pattern) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST} characters")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if parsed.state.flags != re.UNICODE.value:
        raise ValueError("flags are not supported")
    _check_parts(parsed, depth=0)
    return parsed


def _check_parts(parts: _parser.SubPattern, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"its groups are nested more than {_DEEPEST} deep")
    for kind, value in parts:
        if kind is op.BRANCH:
            for branch in value[1]:
                _check_parts(branch, depth + 1)
        elif kind is op.SUBPATTERN and value[1:3] == (0, 0):
            _check_parts(value[3], depth + 1)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            _check_parts(value[2], depth + 1)
        elif kind not in (*_ONE_CHARACTER, op.AT):
            raise ValueError(f"it uses {str(kind).lower()}, which is not supported")


class _Matcher:
    """Ends of the matches of parts of an expression in one name."""

    def __init__(self, name: str):
        self.name = name
        self.known: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, parts: _parser.SubPattern, start: int) -> frozenset[int]:
        """Returns all positions at which a match of the parts from `start` can end."""
        place = (id(parts), start)
        if place not in self.known:
            positions = frozenset([start])
            for kind, value in parts:
                positions = self._union(kind, value, positions)
            self.known[place] = positions
        return self.known[place]

    def _union(self, kind: _Kind, value: Any, starts: Iterable[int]) -> frozenset[int]:
        return frozenset(end for start in starts for end in self._part(kind, value, start))

    def _part(self, kind: _Kind, value: Any, start: int) -> Iterable[int]:
        if kind in _ONE_CHARACTER:
            inside = start < len(self.name) and _accepts(kind, value, self.name[start])
            return [start + 1] if inside else []
        if kind is op.AT:
            return [start] if re.compile(_PLACES[value]).match(self.name, start) else []
        if kind is op.BRANCH:
            return frozenset[int]().union(*(self.ends(branch, start) for branch in value[1]))
        if kind is op.SUBPATTERN:
            return self.ends(value[3], start)
        place = (id(value), start)
        if place not in self.known:
            least, most, parts = value
            self.known[place] = self._repeated(least, most, parts, start)
        return self.known[place]

    def _repeated(
        self, least: int, most: int, parts: _parser.SubPattern, start: int
    ) -> frozenset[int]:
        """Repeats the parts. More repeats than characters match nothing that is not empty."""
        limit = len(self.name) + 1
        new = frozenset([start])
        for _ in range(min(least, limit)):
            new = self._once(parts, new)
        found = new
        for _ in range(min(most - least, limit)):
            new = self._once(parts, new) - found
            found |= new
        return found

    def _once(self, parts: _parser.SubPattern, starts: Iterable[int]) -> frozenset[int]:
        return frozenset(end for start in starts for end in self.ends(parts, start))


def _accepts(kind: _Kind, value: Any, character: str) -> bool:
    """Returns whether a part of an expression that matches one character matches this one."""
    if kind is op.IN:
        is_negated = value[0][0] is op.NEGATE
        return (
            any(_accepts(*each, character=character) for each in value[is_negated:]) != is_negated
        )
    if kind is op.RANGE:
        return value[0] <= ord(character) <= value[1]
    if kind is op.CATEGORY:
        return re.fullmatch(_CATEGORIES[value], character) is not None
    if kind is op.ANY:
        return character != "\n"
    return (character == chr(value)) == (kind is op.LITERAL)
