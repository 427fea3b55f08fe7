r"""Translates the regular expressions of tokenizers to JavaScript.

The `tokenizers` library runs Oniguruma. JavaScript spells the same expressions differently: `\s`
matches another set of characters, and there are no possessive quantifiers. A construct without a
translation raises an error, so a page never splits a text differently from Python.

A browser may implement a newer version of Unicode than the library. The page may then split a text
differently at characters that the newer version added or moved to another class.
"""

import re
from functools import cache, lru_cache

# The characters that these escapes match in Oniguruma.
WHITE_SPACE = r"\p{White_Space}"
_CLASSES = {"s": WHITE_SPACE, "d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}²³¹¼½¾"}
_CONTROLS = {"n": r"\n", "r": r"\r", "t": r"\t", "f": r"\f", "v": r"\v"}
# V8 does not match `\p{L}$` at a character above U+FFFF, so the end is a lookahead.
END = "(?![^])"
_ANCHORS = {"A": "^", "z": END}
_CATEGORIES = {*"L M N P S Z".split(), *"Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi".split()}
_CATEGORIES |= {*"Pf Po Sm Sc Sk So Zs Zl Zp".split()}
_SCRIPTS = {*"Latin Greek Cyrillic Hebrew Arabic Devanagari Thai Hangul Hiragana Katakana".split()}
_SCRIPTS |= {"Han"}
_GROUPS = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|i:))?")
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_PROPERTY = re.compile(r"([pP])\{(\^?)(\w+)\}")
_CODE = re.compile(r"x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")


class Unsupported(ValueError):
    """Raised for a part of a tokenizer that the page does not implement; the message names it."""


def js_pattern(pattern: str) -> str:
    """Returns the source of the JavaScript expression (flag `u`) that matches the same texts.

    Args:
        pattern: An expression in Oniguruma's Ruby syntax.

    Raises:
        Unsupported: The expression contains a construct that this function does not translate.
    """
    reader = _Reader(pattern)
    found = reader.alternatives(fold=False)
    if reader.rest:
        raise reader.unknown(reader.rest[0])
    return found


def js_literal(text: str) -> str:
    """Returns the source of the JavaScript expression that matches exactly `text`."""
    return "".join(f"\\{c}" if c in "^$\\.*+?()[]{}|/" else c for c in text)


class _Reader:
    """Reads an expression from left to right and returns the translation of each construct."""

    def __init__(self, pattern: str):
        """Starts at the first character."""
        self.pattern, self.at, self.num_atomic = pattern, 0, 0

    @property
    def rest(self) -> str:
        """The part that is not read yet."""
        return self.pattern[self.at :]

    def unknown(self, construct: str) -> Unsupported:
        """Returns the error for a construct."""
        return Unsupported(
            f"the page does not translate {construct!r} of the tokenizer's pattern "
            f"{self.pattern[:80]!r} to JavaScript"
        )

    def take(self, text: str) -> bool:
        """Reads `text` if it comes next, and returns whether it did."""
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def alternatives(self, fold: bool) -> str:
        """Reads alternatives up to a closing bracket or the end."""
        parts = [self.sequence(fold)]
        while self.take("|"):
            parts.append(self.sequence(fold))
        return "|".join(parts)

    def sequence(self, fold: bool) -> str:
        """Reads atoms with their quantifiers up to "|", a closing bracket or the end."""
        found = ""
        while self.rest and self.rest[0] not in "|)":
            found += self.quantified(self.atom(fold))
        return found

    def quantified(self, atom: str) -> str:
        """Reads the quantifier after an atom, if there is one."""
        match = _QUANTIFIER.match(self.pattern, self.at)
        if match is None:
            return atom
        self.at = match.end()
        if match[0] == "{,}" or match[0] == "{}":
            raise self.unknown(match[0])
        count = match[0].replace("{,", "{0,")
        following = self.rest[:1]
        if match[0][0] == "{" and following in ("?", "+") and following:
            raise self.unknown(match[0] + following)
        if self.take("?"):
            return f"{atom}{count}?"
        return self.atomic(atom + count) if self.take("+") else atom + count

    def atomic(self, body: str) -> str:
        """Returns a group that does not backtrack, which JavaScript writes as a lookahead."""
        self.num_atomic += 1
        name = f"a{self.num_atomic}"
        return rf"(?:(?=(?<{name}>{body}))\k<{name}>)"

    def atom(self, fold: bool) -> str:
        """Reads a group, a character class, an escape or a character."""
        if group := _GROUPS.match(self.pattern, self.at):
            return self.group(group[0], fold)
        if self.take("["):
            return self.character_class(fold)
        if self.take("\\"):
            found = self.escape(fold)
            return f"[{found}]" if found == _CLASSES["w"] else found
        character = self.pattern[self.at]
        if character in "^$*+?{}])":
            raise self.unknown(character)
        self.at += 1
        if character == ".":
            return r"[^\n]"
        return _folded(character) if fold else js_literal(character)

    def group(self, opening: str, fold: bool) -> str:
        """Reads a group. The expressions have no references, so no group needs to capture."""
        self.at += len(opening)
        if opening == "(" and self.rest[:1] == "?":
            raise self.unknown("(" + self.rest[:2])
        begin = self.at
        body = self.alternatives(fold or opening == "(?i:")
        if not self.take(")"):
            raise self.unknown(opening)
        # In a group (?i:…), Oniguruma matches "ß" with "ss".
        read = self.pattern[begin : self.at].casefold()
        if opening == "(?i:" and any(several in read for several in _folded_to_several()):
            raise self.unknown(f"(?i:{read}")
        if opening == "(?>":
            return self.atomic(body)
        start = opening if opening[2:] in ("=", "!", "<=", "<!") else "(?:"
        return f"{start}{body})"

    def escape(self, fold: bool) -> str:
        """Reads the rest of an escape, outside or inside of a character class."""
        for pattern, translate in ((_PROPERTY, self.property), (_CODE, _code_point)):
            if match := pattern.match(self.pattern, self.at):
                self.at = match.end()
                return translate(match)
        character = self.rest[:1]
        self.at += 1
        if character in _CLASSES:
            return _CLASSES[character]
        if character in ("S", "D"):
            return _CLASSES[character.lower()].replace(r"\p", r"\P")
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character in _ANCHORS:
            return _ANCHORS[character]
        if not character or character.isalnum():
            raise self.unknown("\\" + character)
        return js_literal(character)

    def property(self, match: re.Match) -> str:
        r"""Translates a property such as `\p{Lu}` or `\p{Han}`."""
        sign, negated, name = match.groups()
        if name in _SCRIPTS:
            name = f"Script={name}"
        elif name not in _CATEGORIES:
            raise self.unknown(f"\\{match[0]}")
        return f"\\{'P' if (sign == 'P') != bool(negated) else 'p'}{{{name}}}"

    def character_class(self, fold: bool) -> str:
        """Reads a character class after its opening bracket."""
        sign = "^" if self.take("^") else ""
        return f"[{sign}{self.members(fold)}]"

    def members(self, fold: bool) -> str:
        """Reads the members of a character class up to its closing bracket."""
        found = ""
        while not (found and self.take("]")):
            if not self.rest or self.rest[0] == "]" or self.rest.startswith(("[^", "[:", "&&")):
                raise self.unknown(self.rest[:2] or "[")
            # A class within a class adds its members.
            found += self.members(fold) if self.take("[") else self.member(fold)
        return found

    def member(self, fold: bool) -> str:
        """Reads one escape, character or "-" of a character class."""
        if self.take("\\"):
            escaped = self.rest[:1]
            if escaped in _ANCHORS or escaped == "W":
                raise self.unknown("\\" + escaped)
            return "\\-" if self.take("-") else self.escape(fold)
        character = self.pattern[self.at]
        self.at += 1
        if character == "-":
            # A "-" at an edge of a class is a character; between two characters it is a range.
            is_edge = self.pattern[self.at - 2] in "[^" or self.rest[:1] == "]"
            return r"\-" if is_edge else "-"
        if fold and self.rest[:1] == "-" and self.rest[1:2] != "]":
            raise self.unknown("a range in (?i:…)")
        return _folded(character)[1:-1] if fold else js_literal(character)


def _code_point(match: re.Match) -> str:
    return f"\\u{{{int(next(filter(None, match.groups())), 16):x}}}"


@cache
def _folded_to_several() -> frozenset[str]:
    """Returns the texts of several characters that differ from one character only in their case."""
    folded = (chr(code).casefold() for code in range(0x11000))
    return frozenset(text for text in folded if len(text) > 1)


@lru_cache(maxsize=256)
def _folded(character: str) -> str:
    """Returns the class of the characters that differ from `character` only in their case."""
    folded = character.casefold()
    equal = [chr(code) for code in range(0x11000) if chr(code).casefold() == folded]
    return f"[{''.join(map(js_literal, sorted({character, *equal})))}]"
