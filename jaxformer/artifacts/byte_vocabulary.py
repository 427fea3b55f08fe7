"""Byte-level vocabularies: the bytes of each token, lossless tokenizers, and division of a text.

`lossy_part` and `divides_at_spaces` check the content of a ``tokenizer.json``. A part that is not
known to preserve every text counts as lossy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import tokenizers

NUM_BYTES = 256

# Pre-tokenizers that divide a text and preserve all of it, unless `behavior` is "Removed".
# UnicodeScripts is missing: tokenizers 0.23 loses the space that a text begins with.
_DIVIDES = {"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split"}

# Features that tokenizers often lose: spaces, case, composed and compatibility characters, control
# characters, long sequences.
HARD_TEXTS = (
    "".join(map(chr, range(NUM_BYTES))),
    " a  b\t\n\r\n\u00a0\u2028\u3000 c ",
    "É e\u0301 \u212b ﬁ Ⅷ İ ß ﷺ \ufeff\u200b\u200d\ufffd\U0010ffff",
    "x1 23.45_'ll 'S DON'T#猫と犬👩‍👩‍👧\0",
)

# In GPT-2's pattern a word begins at each of these places, in any context.
_BETWEEN_WORDS = re.compile(r"(?<=\S)[ \n]")
_WITHIN_WORDS = re.compile(
    r"(?<=[A-Za-z])[!-@\[-`{-~]|(?<=[0-9])[A-Za-z!-/:-@\[-`{-~]|(?<=[!-/:-@\[-`{-~])[0-9]"
)
LONGEST_WORD = 1 << 18


def byte_characters() -> list[str]:
    """Returns the 256 visible characters that stand for the bytes 0 to 255 in GPT-2's vocabulary.

    Reference: `bytes_to_unicode` of OpenAI's GPT-2 code.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(NUM_BYTES)]


def lossy_part(parts: dict, vocabulary: dict[str, int], token_bytes: list[bytes]) -> str | None:
    """Returns the part of a tokenizer.json that may change a text, in words, or None.

    The post-processor is not checked here: it treats all texts alike, so encoding one text shows
    whether it is lossy.

    Args:
        parts: The parsed tokenizer.json; vocabulary and merges are not read.
        vocabulary: The ids of the model's tokens.
        token_bytes: The bytes of each id.
    """
    model = parts["model"]
    if parts["normalizer"] is not None:
        return f"its normalizer ({parts['normalizer']['type']}) may change a text"
    steps = list(pre_tokenizer_steps(parts["pre_tokenizer"]))
    for step in steps:
        removes = step.get("behavior") == "Removed" or step.get("add_prefix_space")
        if step["type"] not in _DIVIDES or removes:
            return f"its pre-tokenizer ({step['type']}) may add or drop characters"
    if [step["type"] for step in steps].count("ByteLevel") != 1:
        return "its pre-tokenizer does not take a text as its bytes (ByteLevel), once"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its {name} ({model[name]!r}) is added to words"
    for byte, character in enumerate(byte_characters()):
        if character not in vocabulary or token_bytes[vocabulary[character]] != bytes([byte]):
            return f"no token stands for the byte {byte}"
    for token in _plain(parts["added_tokens"]):
        content = token["content"]
        if token["lstrip"] or token["rstrip"]:
            return f"its added token {content!r} also matches the spaces next to it"
        if content in vocabulary and not content.isascii():
            return f"its added token {content!r} is also a token of other bytes"
    return None


def divides_at_spaces(parts: dict) -> bool:
    """Returns whether a word begins at every space that follows a non-space, in any context.

    This is so for GPT-2's pattern, also if digits are split off first: none of its words contains a
    space after a non-space. For other patterns the function returns False, and for vocabularies
    with added tokens that are ordinary or contain spaces, because these are matched before the text
    is split into words.
    """
    steps = list(pre_tokenizer_steps(parts["pre_tokenizer"]))
    kinds = [step["type"] for step in steps]
    is_gpt2 = kinds in (["ByteLevel"], ["Digits", "ByteLevel"]) and steps[-1]["use_regex"]
    added = parts["added_tokens"]
    has_space = any(character.isspace() for token in added for character in token["content"])
    return is_gpt2 and not has_space and not any(_plain(added))


def pre_tokenizer_steps(part: dict | None) -> Iterator[dict]:
    """Yields the pre-tokenizers of a part in the order in which they run."""
    if part is not None and part["type"] == "Sequence":
        for inner in part["pretokenizers"]:
            yield from pre_tokenizer_steps(inner)
    elif part is not None:
        yield part


def _plain(added_tokens: list[dict]) -> Iterator[dict]:
    """Returns the added tokens that are matched in texts: all but the special ones."""
    return (token for token in added_tokens if not token["special"])


def special_texts(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Returns the text of each special token by its id."""
    added = backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def spelled(backend: tokenizers.Tokenizer, end_of_text: int) -> dict[int, list[int]]:
    """Returns, for special tokens, the single-byte tokens that replace them in an encoded text.

    Merges can build a special token from ordinary text that spells it. The tokenizer then
    replaces it by the tokens of its bytes. If some byte has no token, only the end of text is
    replaced: another special token may be the vocabulary's unknown token.
    """
    alphabet = {c: n for c in byte_characters() if (n := backend.token_to_id(c)) is not None}
    special = special_texts(backend)
    if len(alphabet) < NUM_BYTES:
        special = {end_of_text: special[end_of_text]}
    return {n: [alphabet[c] for c in text if c in alphabet] for n, text in special.items()}


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Returns the bytes of each id: b"" for special tokens and for ids without a token.

    Raises:
      ValueError: If two tokens have the same id, or a token is not made of bytes.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("tokenizer: two tokens of its vocabulary have the same id")
    added = backend.get_added_tokens_decoder()
    for content, token in vocabulary.items():
        if token in added:  # stored as plain text, not in the byte alphabet
            table[token] = b"" if added[token].special else content.encode()
        elif all(character in byte_of for character in content):
            table[token] = bytes(byte_of[character] for character in content)
        else:
            raise ValueError(f"tokenizer: token {content!r} is not made of bytes")
    return table


def cut(parts: Iterable[str], length: int) -> Iterator[str]:
    """Divides a text between words of GPT-2's pattern into pieces of about `length` characters.

    A piece ends before the first space or line break that follows a non-space. If the next
    `LONGEST_WORD` characters have no such place, it ends between an ASCII letter, a digit and
    another sign (but not between a sign and a letter, as in "'s"). Division at these places does
    not change tokens. Without either, a piece ends after `length + LONGEST_WORD` characters, and
    the tokens there may differ from those of the whole text.

    Args:
        parts: The text, in parts of any size. The pieces do not depend on its parts.
        length: Least length of all pieces but the last.
    """
    waiting, most = "", length + LONGEST_WORD
    for part in parts:
        waiting, start = waiting + part, 0
        while len(waiting) - start > most:
            window = (waiting, start + length, start + most)
            found = _BETWEEN_WORDS.search(*window) or _WITHIN_WORDS.search(*window)
            stop = found.start() if found else start + most
            yield waiting[start:stop]
            start = stop
        waiting = waiting[start:]
    start = 0
    while found := _BETWEEN_WORDS.search(waiting, start + length):
        yield waiting[start : found.start()]
        start = found.start()
    yield waiting[start:]
