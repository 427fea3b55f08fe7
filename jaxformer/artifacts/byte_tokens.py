"""What the tokens of a byte-level vocabulary stand for."""

from __future__ import annotations

import tokenizers

from jaxformer.artifacts.lossless import byte_characters


def special_tokens(backend: tokenizers.Tokenizer) -> dict[int, str]:
    added = backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def spelled(backend: tokenizers.Tokenizer, end_of_text: int) -> dict[int, list[int]]:
    """Each special token in the tokens of single bytes from which merges would make it; the end of
    text alone where some bytes have none, since a special token may stand there for the unknown."""
    alphabet = {character: backend.token_to_id(character) for character in byte_characters()}
    special = special_tokens(backend)
    if None in alphabet.values():
        special = {end_of_text: special[end_of_text]}
    return {
        token: [alphabet[c] for c in content if alphabet.get(c) is not None]
        for token, content in special.items()
    }


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of each id: b"" for special tokens and for ids that no token has."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("tokenizer: two tokens of its vocabulary have the same id")
    added = backend.get_added_tokens_decoder()
    for content, token in vocabulary.items():
        if token in added:  # kept as they are written, not in the byte alphabet
            table[token] = b"" if added[token].special else content.encode()
        elif all(character in byte_of for character in content):
            table[token] = bytes(byte_of[character] for character in content)
        else:
            raise ValueError(f"tokenizer: token {content!r} is not made of bytes")
    return table
