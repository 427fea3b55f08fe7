"""Tokenizers of imported models: byte-level BPE, BPE with byte fallback, WordPiece and Unigram.

The ``tokenizers`` library encodes and decodes. The tokenizer's template adds tokens before and
after a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import tokenizers

from jaxformer.artifacts.byte_tokenizer import lossy_part
from jaxformer.artifacts.token_bytes import BYTE_TOKEN
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_files import (
    read_settings_files,
    with_generic_class,
)
from jaxformer.artifacts.untrusted import guarded

_MOST_TOKENS = 2**21


class Subwords(Tokenizer):
    """Encodes text to token ids and decodes them.

    Attributes:
        vocab_size: One more than the largest id.
        special: The `SpecialTokens`.
        text_ids: The ids of all tokens that are not special, in ascending order. The unknown token
            counts as special.
        base_size: One more than the largest id of a token that is not an added token.
    """

    # This attribute overrides the property of the base class.
    special: SpecialTokens = SpecialTokens()

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        settings_files: Mapping[str, str] | None = None,
    ):
        """Wraps a backend and switches off its truncation and padding.

        Args:
            backend: A tokenizer of the `tokenizers` library.
            special: The ids of the special tokens.
            settings_files: See `Tokenizer`. Defaults to an empty dict.

        Raises:
            ValueError: The vocabulary is empty or too large, normalization makes two added tokens
                equal, or the template changes the text.
        """
        super().__init__(backend)
        self.special = special
        self.settings_files = dict(settings_files or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not 0 < len(vocabulary) <= _MOST_TOKENS:
            raise ValueError(
                f"tokenizer: it has {len(vocabulary)} tokens; 1 to {_MOST_TOKENS} are accepted"
            )
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = backend.get_added_tokens_decoder()
        _check_equal_tokens(backend, added.values())
        self.base_size = 1 + max((x for x in vocabulary.values() if x not in added), default=0)
        model = self.parts["model"]
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        is_special = {token for token, entry in added.items() if entry.special}
        self._skipped = is_special
        self._special = is_special - {unknown}
        self.text_ids = sorted(set(vocabulary.values()) - is_special)
        masks = (vocabulary.get(name) for name in ("[MASK]", "<mask>"))
        self.mask_token: int | None = next((x for x in masks if x in is_special), None)
        self.stop_tokens = special.stop_tokens
        self.end_of_text = special.stop_tokens[0] if special.stop_tokens else special.begin
        self.before, self.after = self._template()
        named = (special.begin, special.start, *special.stop_tokens)
        self.special_ids = {x for x in (*named, *self.before, *self.after) if x is not None}

    def _template(self) -> tuple[list[int], list[int]]:
        plain, whole = (self._backend.encode("a", add_special_tokens=x).ids for x in (False, True))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise ValueError("tokenizer: its template must not change the ids of the text itself")

    @property
    def opening(self) -> list[int]:
        """The ids that begin a document.

        The template adds these ids before a text. If the template adds no ids, the document begins
        with the beginning-of-text token or, if that is unknown, with the end-of-text token.

        Raises:
            ValueError: The template adds no ids, and the tokenizer has neither a beginning-of-text
                nor an end-of-text token.
        """
        known = (self.special.begin, self.end_of_text)
        ids = [*self.before] or [x for x in known if x is not None][:1]
        if not ids:
            raise ValueError(
                "tokenizer: it needs a beginning-of-text or end-of-text token to begin a text"
            )
        return ids

    @property
    def text_opening(self) -> list[int]:
        """The ids that the template adds before a text; empty for GPT-2 and Qwen, for example.

        If `opens_texts` is True, each text begins with the ids of `opening` instead, for example
        with a `bos_token_id` that only config.json specifies. jaxformer sets `opens_texts` for
        models that it trained on documents with this first token.
        """
        return self.opening if self.opens_texts else list(self.before)

    def with_backend(self, backend: tokenizers.Tokenizer) -> Subwords:
        """Returns a copy of the tokenizer that encodes with another backend."""
        return type(self)(backend, self.special, with_generic_class(self.settings_files))

    @classmethod
    def load(cls, path: str | Path, special: SpecialTokens) -> Subwords:
        """Reads a ``tokenizer.json`` and the settings files in the same folder.

        Raises:
            ValueError: a file cannot be read. The message gives its path.
        """
        return cls._load(path, special, read_settings_files(Path(path).parent))

    @cached_property
    def why_lossy(self) -> str | None:
        """The reason why ``decode(encode(text))`` may differ from ``text``.

        The value is None if the tokenizer is lossless, that is, if the two texts are always equal.
        Only byte-level BPE can be lossless, and only if each of its parts preserves all bytes.
        """
        model, decoder = type(self._backend.model).__name__, self._backend.decoder
        if model != "BPE" or not isinstance(decoder, tokenizers.decoders.ByteLevel):
            return f"its model, {model}, encodes characters, not bytes, and may change a text"
        words = self._backend.get_vocab(with_added_tokens=False)
        try:
            lossy = lossy_part(self.parts, words, self.vocabulary_bytes)
            return lossy or self._changed_text()
        except ValueError as error:
            return str(error).removeprefix("tokenizer: ")

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of the token with this text in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Encodes a text, splitting spelled-out special tokens after their first character."""
        if self._special.isdisjoint(ids):
            return ids
        names = map(self.token_name, self._special)
        pattern = "|".join(f"(?<={re.escape(x[0])})(?={re.escape(x[1:])})" for x in names if x[1:])
        (ids,) = self._ids_of_pieces([[part for part in re.split(pattern, text) if part]])
        return [token for token in ids if token not in self._special]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids. Special tokens and unused ids decode to the empty text.

        Raises:
            ValueError: An id is negative.
        """
        ids = [int(token) for token in ids]
        if min(ids, default=0) < 0:
            raise ValueError(f"ids: {min(ids)} is not a token id; ids are at least 0")
        return guarded(lambda: self._backend.decode(ids, skip_special_tokens=True))

    def may_be_within_bytes(self, token: int) -> bool:
        """Returns whether a token may continue a sequence of byte tokens (byte fallback).

        A byte token or a token without text may continue the sequence. Any other token ends the
        sequence.
        """
        name = self._backend.id_to_token(token)
        return name is None or token in self._skipped or bool(BYTE_TOKEN.fullmatch(name))

    def stream(self, before: Iterable[int] = ()) -> SubwordStream:
        """Returns an incremental decoder for the ids that follow the ids `before`."""
        return SubwordStream(self, before)


class SubwordStream:
    """Incremental decoder that returns whole words.

    Together, the texts that `push` and `flush` return are the end of `decode(before + ids)`, from
    the first character that differs from `decode(before)`. The new ids may change how the last
    bytes of `before` are decoded, for example by completing a character. The stream then returns
    the changed text.

    `push` returns text only if no later token can change the text. So `push` returns whole words,
    and waits for the end of a sequence of byte tokens. Byte fallback decodes a sequence of byte
    tokens as a unit, and one invalid byte turns all characters of the sequence into U+FFFD.
    """

    def __init__(self, tokenizer: Subwords, before: Iterable[int] = ()):
        """Starts a stream.

        Args:
            tokenizer: The tokenizer.
            before: The ids that precede the stream.
        """
        self._tokenizer, self._ids = tokenizer, list(before)
        self._before, self._given = tokenizer.decode(self._ids), 0

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the newly completed text, which may be empty."""
        self._ids += ids
        text = self._tokenizer.decode(self._without_last_bytes())
        settled = text[: max(text.rstrip().rfind(" "), text.rfind("\n"), 0)].rstrip(" ")
        return self._more(settled.rstrip("\ufffd"))

    def flush(self) -> str:
        """Returns the remaining text and resets the stream."""
        rest = self._more(self._tokenizer.decode(self._ids))
        self._ids, self._before, self._given = [], "", 0
        return rest

    def _without_last_bytes(self) -> list[int]:
        """Removes the sequence of byte tokens at the end of the ids."""
        end = len(self._ids)
        while end and self._tokenizer.may_be_within_bytes(self._ids[end - 1]):
            end -= 1
        return self._ids[:end]

    def _more(self, text: str) -> str:
        """Returns the new part of `text`, without the part that earlier calls returned."""
        pairs = enumerate(zip(text, self._before, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self._before)))
        begin = max(self._given, shared)
        if len(text) > begin:
            self._given = len(text)
        return text[begin:]


def _check_equal_tokens(backend: tokenizers.Tokenizer, added: Iterable) -> None:
    """Raises ValueError if two added tokens are equal after normalization.

    The `tokenizers` library could match either of two equal tokens.
    """
    seen: dict[str, str] = {}
    for token in added:
        if token.special or not token.normalized or backend.normalizer is None:
            continue
        text = backend.normalizer.normalize_str(token.content)
        if text in seen:
            raise ValueError(
                f"tokenizer: its normalizer makes the added tokens {seen[text]!r} and "
                f"{token.content!r} equal, so their ids are ambiguous; remove one of the two"
            )
        seen[text] = token.content
