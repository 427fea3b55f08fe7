"""A lossless byte-level BPE tokenizer.

It encodes the UTF-8 bytes of a text, so there are no unknown characters and no normalization:
``decode(encode(text)) == text`` for every string. A loaded tokenizer of another project may not
guarantee that; `ByteTokenizer.why_lossy` then says why. The ``tokenizers`` library encodes and
decodes, and the file on disk is its ``tokenizer.json``.

Reference: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.artifacts.tokenizer import NUM_BYTES, Tokenizer, special_texts, steps_of

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"

# Names of the end of text in byte-level vocabularies of other projects, in order of preference.
_NAMES_OF_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")

# Pair counting takes time quadratic in a word's length: one line of base64 would train for hours.
# Longer words are split for training only; encoding is not affected.
_LONGEST_TRAINED_WORD = 64

# The encoder holds some hundred bytes per token until the whole text is encoded, and distributes
# whole texts over threads. So long texts are encoded in pieces.
_PIECE_LENGTH = 1 << 18

# Pre-tokenizers that divide a text and preserve all of it, unless `behavior` is "Removed".
# UnicodeScripts is missing: tokenizers 0.23 loses the space that a text begins with.
_DIVIDES = {"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split"}

# In GPT-2's pattern a word begins at each of these places, in any context.
_BETWEEN_WORDS = re.compile(r"(?<=\S)[ \n]")
_WITHIN_WORDS = re.compile(
    r"(?<=[A-Za-z])[!-@\[-`{-~]|(?<=[0-9])[A-Za-z!-/:-@\[-`{-~]|(?<=[!-/:-@\[-`{-~])[0-9]"
)
LONGEST_WORD = 1 << 18


class ByteTokenizer(Tokenizer):
    """Encodes text to token ids and decodes them, with byte-level BPE.

    Attributes:
      vocab_size: One more than the largest id.
      end_of_text: The id that stands before each document and ends the previous one. No text
        encodes to it, not even a text that spells it out, whoever made the tokenizer, unless the
        caller of `encode` allows special tokens.
      stop_tokens: The ids each of which ends a text: `end_of_text` only.
      special_ids: The ids that stand next to a text, or end one: `end_of_text` only.
      why_lossy: None if ``decode(encode(text)) == text`` for every text, as for every tokenizer
        from ``train``. Otherwise the part of a loaded tokenizer that may change a text.
    """

    why_lossy: str | None = None
    _NAME = "byte-level BPE tokenizer"

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a ``tokenizers.Tokenizer``.

        Raises:
          ValueError: If it is not byte-level BPE, or has no end of text.
        """
        if not isinstance(backend.model, models.BPE):
            raise ValueError(f"tokenizer: its model is {type(backend.model).__name__}, not BPE")
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                f"tokenizer: its decoder is {type(backend.decoder).__name__}, not ByteLevel"
            )
        ids = {x: n for x in _NAMES_OF_END_OF_TEXT if (n := backend.token_to_id(x)) is not None}
        if not ids:
            raise ValueError(f"tokenizer: it has none of {', '.join(_NAMES_OF_END_OF_TEXT)}")
        name, self.end_of_text = next(iter(ids.items()))
        self.stop_tokens = self.special_ids = (self.end_of_text,)
        if name not in special_texts(backend).values():
            backend.add_special_tokens([name])  # not matched in texts, and decoded to nothing
        super().__init__(backend)
        self._token_bytes = vocabulary_bytes(backend)
        self.vocab_size: int = len(self._token_bytes)
        self.text_ids = [token for token, text in enumerate(self._token_bytes) if text]
        self.mask_token: int | None = backend.token_to_id(MASK)
        self._spellings = spellings(backend, self.end_of_text)
        self._may_be_cut = False  # until the pre-tokenizer has been checked below
        words = backend.get_vocab(with_added_tokens=False)
        lossy = lossy_part(self.parts, words, self._token_bytes)
        self.why_lossy = lossy or self._changed_text()
        self._may_be_cut = self.lossless and divides_at_spaces(self.parts)

    def with_backend(self, backend: tokenizers.Tokenizer) -> ByteTokenizer:
        """Returns a tokenizer that encodes with `backend`."""
        return type(self)(backend)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        split_digits: bool = False,
        mask: bool = False,
    ) -> ByteTokenizer:
        """Learns merges from ``texts``. Equal texts in equal order give an equal tokenizer.

        Id 0 is the end of text, ids 1 to 256 are the bytes, and the merges follow in the order in
        which they were learned, so ``vocab_size=257`` gives one token per byte. A pair that occurs
        only once is not merged: a small corpus may give fewer than ``vocab_size`` tokens.

        Args:
          texts: The training texts.
          vocab_size: Largest number of ids.
          split_digits: Whether each digit is a token of its own.
          mask: Whether the last id is a mask token, which stands for a hidden token.

        Raises:
          ValueError: If ``vocab_size`` is below 257, or below 258 with ``mask``.
        """
        least = NUM_BYTES + 1 + mask
        if vocab_size < least:
            raise ValueError(
                f"vocab_size: {vocab_size} is too small; a byte-level tokenizer needs at least "
                f"{least} ({NUM_BYTES} bytes, the end of text{' and the mask' * mask})"
            )
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend = tokenizers.Tokenizer(models.BPE())
        backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.FixedLength(_LONGEST_TRAINED_WORD)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - mask,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if mask:
            backend.add_special_tokens([MASK])
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> ByteTokenizer:
        """Reads a ``tokenizer.json``.

        Raises:
          ValueError: If it cannot be read or is not byte-level BPE. The message names ``path``.
        """
        return cls._load(path)

    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Replaces special tokens by the tokens of their bytes."""
        if self._spellings.keys().isdisjoint(ids):
            return ids
        return [part for token in ids for part in self._spellings.get(token, (token,))]

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """Divides a text into pieces that are encoded one by one.

        A text is divided between words of GPT-2's pattern, where that cannot change tokens, except
        within words of more than `LONGEST_WORD` characters. For another pattern the text stays
        whole.

        Args:
          parts: The text, in parts of any size.
        """
        return cut(parts, _PIECE_LENGTH) if self._may_be_cut else super().pieces(parts)

    @property
    def opening(self) -> list[int]:
        """The ids that begin a text to generate or to score.

        The model needs a token before the first token that it predicts.
        """
        return list(self.stop_tokens)

    def stream(self, before: Iterable[int] = ()) -> StreamDecoder:
        """Returns a decoder for ids that arrive one after another, following those of `before`."""
        return StreamDecoder(self, before)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids. Invalid UTF-8 becomes U+FFFD, special tokens the empty text.

        Raises:
          ValueError: If an id is outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token, possibly a part of a character; b"" if it is special."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(
                f"ids: {token} is not a token id; it must be 0 to {self.vocab_size - 1}"
            )
        return self._token_bytes[token]


class StreamDecoder:
    """Decodes ids as they arrive, character by character.

    All pushes and the flush together return the text of `decode(before + ids)` after the prefix
    that it shares with `decode(before)`: all of the new text and, if `before` ends within a
    character, the whole character.
    """

    def __init__(self, tokenizer: ByteTokenizer, before: Iterable[int] = ()):
        """Starts a stream.

        Args:
          tokenizer: The tokenizer.
          before: The ids that precede the new ones.
        """
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = ""
        self.push(before)
        # An incomplete character at the end of `before` was decoded as at most one U+FFFD.
        self._shown = "\ufffd" if self._decoder.getstate()[0] else ""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""
        return self._new(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids))))

    def flush(self) -> str:
        """Returns the remaining text (U+FFFD for an unfinished character) and starts afresh."""
        rest = self._new(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._shown = ""
        return rest

    def _new(self, text: str) -> str:
        """Returns the text without the U+FFFD that it shares with the text of `before`."""
        if text:
            text, self._shown = text.removeprefix(self._shown), ""
        return text


# ---- byte-level vocabularies


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
    steps = steps_of(parts, "pre_tokenizer")
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
    steps = steps_of(parts, "pre_tokenizer")
    kinds = [step["type"] for step in steps]
    is_gpt2 = kinds in (["ByteLevel"], ["Digits", "ByteLevel"]) and steps[-1]["use_regex"]
    added = parts["added_tokens"]
    has_space = any(character.isspace() for token in added for character in token["content"])
    return is_gpt2 and not has_space and not any(_plain(added))


def _plain(added_tokens: list[dict]) -> Iterator[dict]:
    """Returns the added tokens that are matched in texts: all but the special ones."""
    return (token for token in added_tokens if not token["special"])


def spellings(backend: tokenizers.Tokenizer, end_of_text: int) -> dict[int, list[int]]:
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


def vocabulary_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
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
