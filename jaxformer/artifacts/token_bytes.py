"""The bytes that each token adds to a text."""

import re
from collections.abc import Mapping

import tokenizers

NUM_BYTES = 256
# Name of a token that stands for one byte. Byte tokens encode characters that are not tokens.
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoder steps that change each token independently of the tokens around it. "Strip" only
# removes a space at the beginning of a text, so it does not change generated tokens, which follow a
# prompt.
_BY_TOKEN = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_characters() -> list[str]:
    """Returns the 256 visible characters that represent the bytes 0 to 255 in GPT-2's vocabulary.

    Reference: `bytes_to_unicode` of OpenAI's GPT-2 code.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(NUM_BYTES)]


def byte_level_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Returns the bytes of each id; b"" for special tokens and unused ids.

    Raises:
        ValueError: Two tokens have the same id, or a token contains a character that does not
            represent a byte.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("tokenizer: two tokens of its vocabulary have the same id")
    added = backend.get_added_tokens_decoder()
    for content, token in vocabulary.items():
        # The spelling of an added token is plain text, not characters that represent bytes.
        if token in added:
            table[token] = b"" if added[token].special else content.encode()
        elif all(character in byte_of for character in content):
            table[token] = bytes(byte_of[character] for character in content)
        else:
            raise ValueError(
                f"tokenizer: token {content!r} contains a character that does not represent a byte"
            )
    return table


def vocabulary_bytes(backend: tokenizers.Tokenizer, steps: list[dict]) -> list[bytes]:
    """Returns the bytes that each id adds to a text; b"" for special tokens and unused ids.

    A SentencePiece decoder drops the leading space of a text's first token. The returned bytes
    include this space, because generated tokens follow a prompt.

    Args:
        backend: The tokenizer.
        steps: The steps of its decoder, in the order of execution.

    Raises:
        ValueError: The bytes of a token depend on the tokens around it, as with WordPiece.
    """
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return byte_level_bytes(backend)
    by_pattern = any("Regex" in step.get("pattern", {}) for step in steps)
    if not names or by_pattern or not _BY_TOKEN.issuperset(names):
        decoder = " and ".join(names) or "none"
        raise ValueError(
            f"the bytes of a single token are not defined for this tokenizer (decoder: {decoder}); "
            "use a tokenizer with byte-level BPE or SentencePiece"
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    added = backend.get_added_tokens_decoder()
    spaces = _spaces(steps)
    for content, token in vocabulary.items():
        if token in added and added[token].special:
            continue
        byte = BYTE_TOKEN.fullmatch(content) if "ByteFallback" in names else None
        table[token] = bytes([int(byte[1], 16)]) if byte else _replaced(content, spaces).encode()
    return table


def _spaces(steps: list[dict]) -> Mapping[str, str]:
    """Returns {old: new} for the replacements in a decoder's steps, such as {"▁": " "}."""
    found = {step["replacement"]: " " for step in steps if step["type"] == "Metaspace"}
    return found | {
        step["pattern"]["String"]: step["content"]
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    }


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
