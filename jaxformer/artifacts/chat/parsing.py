"""Encodes a text, in which special tokens are recognized only after a mark."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate

import tokenizers

from jaxformer.artifacts.files import json_text, parse_json
from jaxformer.artifacts.untrusted import in_pieces

# Replaces special tokens among the ids of a text by other tokens.
Spell = Callable[[list[int], str], list[int]]


@dataclass(frozen=True)
class Token:
    """A token with its range of characters. Tokens with equal ids are equal.

    Attributes:
        id: The token id.
        start: The first character.
        end: The end of the range.
    """

    id: int
    start: int = field(compare=False)
    end: int = field(compare=False)


class MarkedParser:
    """Encodes a text; a special token is recognized only after a mark.

    The parser uses a copy of the tokenizer's backend, in which each special token begins with the
    mark. The copy gives such tokens new ids, which are replaced by the ids of the special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, mark: str):
        """Copies a backend.

        Args:
            backend: The backend of a tokenizer.
            mark: A character that no text contains.
        """
        content = parse_json(backend.to_str())
        names = {}
        for entry in content["added_tokens"]:
            if entry["special"]:
                entry["content"] = mark + entry["content"]
            names[entry["content"]] = entry["id"]
        self._special: Collection[int] = {x["id"] for x in content["added_tokens"] if x["special"]}
        self.mark = mark
        self._backend = tokenizers.Tokenizer.from_str(json_text(content))
        self._backend.encode_special_tokens = False
        self._ids = {self._backend.token_to_id(name): token for name, token in names.items()}

    def parse(self, text: str, in_parts: bool, spell: Spell) -> list[Token]:
        """Encodes a text with marks.

        Args:
            text: The text.
            in_parts: Whether the patterns of the tokenizer are matched on short pieces only.
            spell: Replaces a special token that the tokenizer's model merged from plain text.

        Returns:
            The tokens. Their ranges refer to the text without marks.
        """
        pieces = in_pieces(self._encode, text) if in_parts else [(0, self._encode(text))]
        tokens = [
            replace(token, start=begin + token.start, end=begin + token.end)
            for begin, part in pieces
            for token in part
        ]
        # The number of marks before each character.
        marks = [0, *accumulate(character == self.mark for character in text)]
        return [
            Token(id, token.start - marks[token.start], token.end - marks[token.end])
            for token in tokens
            for id in self._true_ids(token, text, spell)
        ]

    def _encode(self, text: str) -> list[Token]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [Token(token, *place) for token, place in pairs]

    def _true_ids(self, token: Token, text: str, spell: Spell) -> list[int]:
        """Converts a token of the copied backend to ids of the original tokenizer."""
        if token.id in self._ids:
            return [self._ids[token.id]]
        if token.id in self._special:
            return spell([token.id], text[token.start : token.end])
        return [token.id]
