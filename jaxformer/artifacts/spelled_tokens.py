"""Counts and reports the special tokens that a text spells out."""

import re
from collections import Counter
from collections.abc import Iterable

from jaxformer.artifacts.tokenizer import Tokenizer

# The maximum number of different special tokens that `report_special_tokens` lists.
_SHOWN = 4


def spelled_tokens(tokenizer: Tokenizer, parts: Iterable[str]) -> Counter[str]:
    """Counts the special tokens that a text spells out.

    Args:
        tokenizer: The tokenizer that defines the special tokens.
        parts: Strings of any length, whose concatenation is the text.

    Returns:
        The number of occurrences of each special token in the text.
    """
    # The longest words come first, because a regular expression prefers the first alternative.
    words = sorted(tokenizer.special_words, key=len, reverse=True)
    found: Counter[str] = Counter()
    if not words:
        return found
    pattern, overlap, rest = re.compile("|".join(map(re.escape, words))), len(words[0]) - 1, ""
    for part in parts:
        text, at = rest + part, 0
        # The next part of the text could lengthen a match that starts at `end` or later.
        end = len(text) - overlap
        while (match := pattern.search(text, at)) and match.start() < end:
            found[match[0]] += 1
            at = match.end()
        rest = text[max(at, end, 0) :]
    found.update(pattern.findall(rest))
    return found


def report_special_tokens(tokenizer: Tokenizer, found: Counter[str], where: str) -> str | None:
    """Reports how the special tokens that a text spells out were encoded.

    Args:
        tokenizer: The tokenizer that encoded the text.
        found: The result of `spelled_tokens`.
        where: The name of the text, such as "the prompt".

    Returns:
        The report in one line, or None if the text does not contain special tokens.
    """
    if not (number := found.total()):
        return None
    words = [f"{word} ({count:,})" for word, count in found.most_common(_SHOWN)]
    listed = ", ".join(words) + " …" * (len(found) > _SHOWN)
    tokens = "special token is" if number == 1 else "special tokens are"
    begin = f"{number:,} {tokens} spelled out in {where}: {listed}"
    if tokenizer.parses_special:
        return f"{begin}; each is encoded as one special token (--parse-special)"
    return (
        f"warning: {begin}; each is encoded as plain text. To encode special tokens, add "
        "--parse-special"
    )
