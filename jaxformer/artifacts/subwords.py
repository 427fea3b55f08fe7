"""Tokenizers of other models: BPE over bytes or with byte fallback, WordPiece, Unigram.

The ``tokenizers`` library encodes and decodes. The tokenizer's template decides which tokens stand
before and after a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import tokenizers

from jaxformer.artifacts.byte_tokenizer import lossy_part, vocabulary_bytes
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_files import (
    read_settings_files,
    with_generic_class,
    write_settings_files,
)
from jaxformer.artifacts.untrusted import guarded

_MOST_TOKENS = 2**21
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Subwords(Tokenizer):
    """Encodes text to token ids and decodes them.

    Attributes:
      vocab_size: One more than the largest id.
      special: The `SpecialTokens`.
      text_ids: The ids of text in ascending order: all but those of special tokens. The unknown
        token is special, too.
      base_size: One more than the largest id that is not of an added token.
      settings_files: Text of the files with the tokenizer's settings in transformers, by path.
    """

    special: SpecialTokens = SpecialTokens()  # overrides the property

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        settings_files: Mapping[str, str] | None = None,
    ):
        """Wraps a backend, whose truncation and padding are switched off.

        Args:
          backend: The tokenizer of the library.
          special: The special ids.
          settings_files: See the class; None: there are no such files.

        Raises:
          ValueError: If the backend has no tokens or too many, or added tokens that cannot be told
            apart, or a template that changes the text.
        """
        super().__init__(backend)
        self.special = special
        self.settings_files = dict(settings_files or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not 0 < len(vocabulary) <= _MOST_TOKENS:
            raise ValueError(f"tokenizer: it has {len(vocabulary)} tokens")
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = backend.get_added_tokens_decoder()
        _check_equal_tokens(backend, added.values())
        self.base_size = 1 + max((x for x in vocabulary.values() if x not in added), default=0)
        model = self.parts["model"]
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        is_special = {token for token, entry in added.items() if entry.special}
        self._skipped = is_special  # when decoding
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
        raise ValueError("tokenizer: its template changes the text")

    @property
    def opening(self) -> list[int]:
        """The ids of the template before a text, or else the beginning- or end-of-text token.

        Raises:
          ValueError: If no such token is known.
        """
        known = (self.special.begin, self.end_of_text)
        ids = [*self.before] or [x for x in known if x is not None][:1]
        if not ids:
            raise ValueError("tokenizer: it has no token to begin a text with")
        return ids

    @property
    def text_opening(self) -> list[int]:
        """The ids of the template before a text, as in transformers; GPT-2's and Qwen's have none.

        A token that only config.json names (`bos_token_id`) begins a text only in a run that was
        trained here, whose documents begin with it (`opens_texts`).
        """
        return self.opening if self.opens_texts else list(self.before)

    def with_backend(self, backend: tokenizers.Tokenizer) -> Subwords:
        """Returns a tokenizer with the same special ids that encodes with `backend`."""
        return type(self)(backend, self.special, with_generic_class(self.settings_files))

    @classmethod
    def load(cls, path: str | Path, special: SpecialTokens) -> Subwords:
        """Reads a ``tokenizer.json`` and the settings files beside it.

        Raises:
          ValueError: If a file cannot be read. The message names it.
        """
        return cls._load(path, special, read_settings_files(Path(path).parent))

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` to ``path`` and the settings files beside it."""
        super().save(path)
        write_settings_files(Path(path).parent, self.settings_files)

    @cached_property
    def why_lossy(self) -> str | None:
        """The reason why ``decode(encode(text))`` may differ from ``text``; None if it never does.

        Only byte-level BPE can be lossless, and only if each of its parts preserves all bytes.
        """
        model, decoder = type(self._backend.model).__name__, self._backend.decoder
        if model != "BPE" or not isinstance(decoder, tokenizers.decoders.ByteLevel):
            return f"it is {model} over characters, not over bytes, and may change a text"
        words = self._backend.get_vocab(with_added_tokens=False)
        try:
            lossy = lossy_part(self.parts, words, vocabulary_bytes(self._backend))
            return lossy or self._changed_text()
        except ValueError as error:
            return str(error).removeprefix("tokenizer: ")

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token by its text in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Encodes a text that spells out special tokens, each split after its first character."""
        if self._special.isdisjoint(ids):
            return ids
        names = map(self.name_of, self._special)
        pattern = "|".join(f"(?<={re.escape(x[0])})(?={re.escape(x[1:])})" for x in names if x[1:])
        (ids,) = self._ids_of_pieces([[part for part in re.split(pattern, text) if part]])
        return [token for token in ids if token not in self._special]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids. Special tokens and ids without a token decode to the empty text.

        Models often have ids without a token.

        Raises:
          ValueError: If an id is negative.
        """
        ids = [int(token) for token in ids]
        if min(ids, default=0) < 0:
            raise ValueError(f"ids: {min(ids)} is not a token id")
        return guarded(lambda: self._backend.decode(ids, skip_special_tokens=True))

    def may_be_within_bytes(self, token: int) -> bool:
        """Returns whether a run of byte tokens (byte fallback) may continue at this token.

        It may if the token is a byte token or has no text.
        """
        name = self._backend.id_to_token(token)
        return name is None or token in self._skipped or bool(_BYTE_TOKEN.fullmatch(name))

    def stream(self, before: Iterable[int] = ()) -> SubwordStream:
        """Returns a decoder for ids that arrive one after another, following those of `before`."""
        return SubwordStream(self, before)


class SubwordStream:
    """Decodes ids as they arrive, word by word.

    All pushes and the flush together return the text of `decode(before + ids)` after the prefix
    that it shares with `decode(before)`. That is all of the new text. If the new ids change how the
    end of `before` decodes (its last bytes become a character, or stop being one), the changed end
    is returned again.

    A push returns text only if no later token can change it: whole words, and no byte of a run of
    byte tokens that may continue. Byte fallback decodes such a run as a whole, so a stray byte
    after it turns all of its characters into U+FFFD.
    """

    def __init__(self, tokenizer: Subwords, before: Iterable[int] = ()):
        """Starts a stream.

        Args:
          tokenizer: The tokenizer.
          before: The ids that precede the new ones.
        """
        self._tokenizer, self._ids = tokenizer, list(before)
        self._before, self._given = tokenizer.decode(self._ids), 0

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""
        self._ids += ids
        text = self._tokenizer.decode(self._without_last_bytes())
        settled = text[: max(text.rstrip().rfind(" "), text.rfind("\n"), 0)].rstrip(" ")
        return self._more(settled.rstrip("\ufffd"))

    def flush(self) -> str:
        """Returns the remaining text and starts afresh."""
        rest = self._more(self._tokenizer.decode(self._ids))
        self._ids, self._before, self._given = [], "", 0
        return rest

    def _without_last_bytes(self) -> list[int]:
        """Returns the ids without the run of byte tokens at the end."""
        end = len(self._ids)
        while end and self._tokenizer.may_be_within_bytes(self._ids[end - 1]):
            end -= 1
        return self._ids[:end]

    def _more(self, text: str) -> str:
        """Returns the part of `text`, a prefix of the whole text, that was not returned yet."""
        pairs = enumerate(zip(text, self._before, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self._before)))
        begin = max(self._given, shared)
        if len(text) > begin:
            self._given = len(text)
        return text[begin:]


def _check_equal_tokens(backend: tokenizers.Tokenizer, added: Iterable) -> None:
    """Raises ValueError if two added tokens are equal after normalization.

    The library would then match either of them in a text, unpredictably.
    """
    seen: dict[str, str] = {}
    for token in added:
        if token.special or not token.normalized or backend.normalizer is None:
            continue
        text = backend.normalizer.normalize_str(token.content)
        if text in seen:
            raise ValueError(
                f"tokenizer: its normalizer makes the added tokens {seen[text]!r} and "
                f"{token.content!r} equal; a text cannot hold both"
            )
        seen[text] = token.content
