"""Special tokens that a text spells out, such as ``<|im_start|>``, and how to report them.

A tokenizer reads them as plain text unless its caller allows special tokens (see
`Tokenizer.encode`). A text of unknown origin could otherwise end a document or pretend to be the
other side of a chat.
"""

import re
from collections import Counter
from collections.abc import Iterable

from jaxformer.artifacts.tokenizer import Tokenizer

_SHOWN = 4  # spellings in a report


def spelled_tokens(tokenizer: Tokenizer, parts: Iterable[str]) -> Counter[str]:
    """Counts the special tokens that a text spells out.

    Args:
        tokenizer: The tokenizer, whose special tokens are counted.
        parts: The text, in parts of any size.

    Returns:
        The number of occurrences of each special token that occurs.
    """
    words = sorted(tokenizer.special_words, key=len, reverse=True)  # the longest match counts
    found: Counter[str] = Counter()
    if not words:
        return found
    pattern, overlap, rest = re.compile("|".join(map(re.escape, words))), len(words[0]) - 1, ""
    for part in parts:
        text, at = rest + part, 0
        end = len(text) - overlap  # a word that begins later may continue in the next part
        while (match := pattern.search(text, at)) and match.start() < end:
            found[match[0]] += 1
            at = match.end()
        rest = text[max(at, end, 0) :]
    found.update(pattern.findall(rest))
    return found


def report_of(tokenizer: Tokenizer, found: Counter[str], where: str) -> str | None:
    """Returns a line that says how the special tokens in a text were read.

    Args:
        tokenizer: The tokenizer that read the text.
        found: What `spelled_tokens` counted.
        where: The name of the text, such as "the prompt".

    Returns:
        The line; None if there are no such tokens.
    """
    if not (number := found.total()):
        return None
    words = [f"{word} ({count:,})" for word, count in found.most_common(_SHOWN)]
    listed = ", ".join(words) + " …" * (len(found) > _SHOWN)
    tokens = "special token" if number == 1 else "special tokens"
    begin = f"{number:,} {tokens} spelled out in {where}: {listed}"
    if tokenizer.parses_special:
        return f"{begin}; read as tokens (--parse-special)"
    return f"warning: {begin}; read as plain text. --parse-special reads them as tokens"
