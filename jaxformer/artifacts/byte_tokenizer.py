"""A lossless byte-level BPE tokenizer.

Every string satisfies ``decode(encode(text)) == text``, because the tokens are sequences of UTF-8
bytes and the text is not normalized. A tokenizer that another project trained may be lossy;
`ByteTokenizer.why_lossy` then gives the reason. The ``tokenizers`` library encodes and decodes, and
the tokenizer is stored as its ``tokenizer.json``.

Reference: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.artifacts.token_bytes import NUM_BYTES, byte_characters, byte_level_bytes
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_files import read_settings_files
from jaxformer.artifacts.tokenizer_parts import list_steps, special_texts

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"

# Names of the end-of-text token in vocabularies of other projects. If a vocabulary contains several
# of these names, the first one is used.
_NAMES_OF_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")

# Counting pairs takes time quadratic in the length of a word, so training on one line of base64
# would take hours. Training therefore splits words into pieces of at most this length. Encoding
# does not split words.
_LONGEST_TRAINED_WORD = 64

# Long texts are encoded in pieces. The `tokenizers` library needs some hundred bytes of memory per
# token, and it encodes each text in a single thread.
_PIECE_LENGTH = 1 << 18

# These pre-tokenizers preserve every character, unless their `behavior` is "Removed".
# UnicodeScripts is excluded, because tokenizers 0.23 drops a space at the start of a text.
_DIVIDES = {"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split"}

# In GPT-2's pattern, a word begins wherever one of these two expressions matches.
_BETWEEN_WORDS = re.compile(r"(?<=\S)[ \n]")
_WITHIN_WORDS = re.compile(
    r"(?<=[A-Za-z])[!-@\[-`{-~]|(?<=[0-9])[A-Za-z!-/:-@\[-`{-~]|(?<=[!-/:-@\[-`{-~])[0-9]"
)
LONGEST_WORD = 1 << 18


class ByteTokenizer(Tokenizer):
    """Encodes text to token ids and decodes them, with byte-level BPE.

    Attributes:
        vocab_size: One more than the largest id.
        end_of_text: The id that separates documents. Even if a text spells the token out,
            `encode` produces this id only if special tokens are allowed.
        stop_tokens: The ids that end a text, always `(end_of_text,)`.
        special_ids: The ids that may come before or after a text, always `(end_of_text,)`.
        why_lossy: A description of the component that may change a text. None if
            ``decode(encode(text)) == text`` holds for every text, as for every tokenizer from
            ``train``.
    """

    why_lossy: str | None = None
    _NAME = "byte-level BPE tokenizer"

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a ``tokenizers.Tokenizer``.

        Raises:
            ValueError: The tokenizer is not byte-level BPE, or lacks an end-of-text token.
        """
        if not isinstance(backend.model, models.BPE):
            raise ValueError(f"tokenizer: its model is {type(backend.model).__name__}, not BPE")
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                f"tokenizer: its decoder is {type(backend.decoder).__name__}, not ByteLevel"
            )
        ids = {x: n for x in _NAMES_OF_END_OF_TEXT if (n := backend.token_to_id(x)) is not None}
        if not ids:
            raise ValueError(
                f"tokenizer: it has no end-of-text token ({' or '.join(_NAMES_OF_END_OF_TEXT)})"
            )
        name, self.end_of_text = next(iter(ids.items()))
        self.stop_tokens = self.special_ids = (self.end_of_text,)
        if name not in special_texts(backend).values():
            # For a special token, the library encodes the spelled-out text as plain text, and
            # decodes the id to "".
            backend.add_special_tokens([name])
        super().__init__(backend)
        self.vocabulary_bytes = byte_level_bytes(backend)
        self.vocab_size: int = len(self.vocabulary_bytes)
        self.text_ids = [token for token, text in enumerate(self.vocabulary_bytes) if text]
        self.mask_token: int | None = backend.token_to_id(MASK)
        self._spellings = spellings(backend, self.end_of_text)
        # `_changed_text` must encode its texts without splitting them.
        self._may_be_cut = False
        words = backend.get_vocab(with_added_tokens=False)
        lossy = lossy_part(self.parts, words, self.vocabulary_bytes)
        self.why_lossy = lossy or self._changed_text()
        self._may_be_cut = self.lossless and divides_at_spaces(self.parts)

    def with_backend(self, backend: tokenizers.Tokenizer) -> ByteTokenizer:
        """Returns a tokenizer that encodes with `backend`."""
        changed = type(self)(backend)
        changed.settings_files = self.settings_files
        return changed

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        split_digits: bool = False,
        mask: bool = False,
    ) -> ByteTokenizer:
        """Trains a tokenizer on ``texts``; the result is deterministic.

        Id 0 is the end of text, ids 1 to 256 are the bytes, and the merged tokens follow in the
        order of training. With ``vocab_size=257``, each byte of a text is one token. Only pairs
        that occur at least twice are merged, so a small corpus may give fewer than ``vocab_size``
        tokens.

        Args:
            texts: The training texts.
            vocab_size: Maximum number of ids.
            split_digits: Whether each digit is a separate token.
            mask: Whether the last id is a mask token.

        Raises:
            ValueError: ``vocab_size`` is below 257, or below 258 with ``mask``.
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
        """Reads a ``tokenizer.json``, and the chat template in the same folder.

        Raises:
            ValueError: The file cannot be read or is not byte-level BPE. The message names
                ``path``.
        """
        tokenizer = cls._load(path)
        tokenizer.settings_files = read_settings_files(Path(path).parent)
        return tokenizer

    def _spell(self, ids: list[int], text: str) -> list[int]:
        """Replaces the ids of special tokens by the tokens of their bytes."""
        if self._spellings.keys().isdisjoint(ids):
            return ids
        return [part for token in ids for part in self._spellings.get(token, (token,))]

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """Splits a text into pieces that are encoded separately.

        Texts are split only between words of GPT-2's pattern, which does not change the tokens.
        Words of more than `LONGEST_WORD` characters are split too. If the tokenizer uses another
        pattern, the whole text is one piece.

        Args:
            parts: Strings of any length, whose concatenation is the text.
        """
        return cut(parts, _PIECE_LENGTH) if self._may_be_cut else super().pieces(parts)

    @property
    def opening(self) -> list[int]:
        """The ids before a text that is generated or scored.

        The model needs a first input token to predict the first token of the text.
        """
        return list(self.stop_tokens)

    def stream(self, before: Iterable[int] = ()) -> StreamDecoder:
        """Returns an incremental decoder for the ids that follow the ids `before`."""
        return StreamDecoder(self, before)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; invalid UTF-8 becomes U+FFFD, and special tokens decode to "".

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token, or b"" for a special token.

        The bytes of a token may be a part of a character.
        """
        if not 0 <= token < self.vocab_size:
            raise ValueError(
                f"ids: {token} is not a token id; it must be 0 to {self.vocab_size - 1}"
            )
        return self.vocabulary_bytes[token]


class StreamDecoder:
    """Incremental decoder that returns whole characters.

    Together, the results of all calls of `push` and of the final `flush` are the text that the new
    ids add to `decode(before)`. If `before` ends within a character, the results contain the whole
    character.
    """

    def __init__(self, tokenizer: ByteTokenizer, before: Iterable[int] = ()):
        """Starts a stream.

        Args:
            tokenizer: The tokenizer.
            before: The token ids before the ids that `push` will receive.
        """
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = ""
        self.push(before)
        # `decode(before)` shows an incomplete last character as one U+FFFD.
        self._shown = "\ufffd" if self._decoder.getstate()[0] else ""

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the newly completed text, which may be empty."""
        return self._new(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids))))

    def flush(self) -> str:
        """Returns the remaining text and resets the decoder.

        An incomplete character becomes U+FFFD.
        """
        rest = self._new(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._shown = ""
        return rest

    def _new(self, text: str) -> str:
        """Removes a U+FFFD at the start of `text` that `decode(before)` already contains."""
        if text:
            text, self._shown = text.removeprefix(self._shown), ""
        return text


# ---- byte-level vocabularies


def lossy_part(parts: dict, vocabulary: dict[str, int], token_bytes: list[bytes]) -> str | None:
    """Describes the part of a tokenizer.json that may change a text, or returns None.

    This function does not check the post-processor. A post-processor treats all texts alike, so
    encoding one text shows whether the post-processor is lossy.

    Args:
        parts: The parsed tokenizer.json. The vocabulary and the merges may be missing.
        vocabulary: A dict from each token of the model to its id.
        token_bytes: The bytes of each id.
    """
    model = parts["model"]
    if parts["normalizer"] is not None:
        return f"its normalizer ({parts['normalizer']['type']}) may change a text"
    steps = list_steps(parts, "pre_tokenizer")
    for step in steps:
        removes = step.get("behavior") == "Removed" or step.get("add_prefix_space")
        if step["type"] not in _DIVIDES or removes:
            return f"its pre-tokenizer ({step['type']}) may add or remove characters"
    if [step["type"] for step in steps].count("ByteLevel") != 1:
        return "its pre-tokenizer must contain exactly one ByteLevel step"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its {name} ({model[name]!r}) adds characters to words"
    for byte, character in enumerate(byte_characters()):
        if character not in vocabulary or token_bytes[vocabulary[character]] != bytes([byte]):
            return f"its vocabulary has no token for the byte {byte}"
    for token in _plain(parts["added_tokens"]):
        content = token["content"]
        if token["lstrip"] or token["rstrip"]:
            return f"its added token {content!r} removes adjacent spaces (lstrip or rstrip)"
        if content in vocabulary and not content.isascii():
            return f"its added token {content!r} is also the text of a token for other bytes"
    return None


def divides_at_spaces(parts: dict) -> bool:
    """Returns whether a word begins at every space that follows a non-space, in any context.

    GPT-2's pattern has this property, even if digits are split off first, because its words contain
    spaces only at their start. The function returns False for any other pattern. The result is also
    False if the vocabulary has added tokens that are not special, or that contain spaces. Added
    tokens are matched before the text is split into words.
    """
    steps = list_steps(parts, "pre_tokenizer")
    kinds = [step["type"] for step in steps]
    is_gpt2 = kinds in (["ByteLevel"], ["Digits", "ByteLevel"]) and steps[-1]["use_regex"]
    added = parts["added_tokens"]
    has_space = any(character.isspace() for token in added for character in token["content"])
    return is_gpt2 and not has_space and not any(_plain(added))


def _plain(added_tokens: list[dict]) -> Iterator[dict]:
    """Returns the added tokens that are not special, which are matched anywhere in a text."""
    return (token for token in added_tokens if not token["special"])


def spellings(backend: tokenizers.Tokenizer, end_of_text: int) -> dict[int, list[int]]:
    """Returns the single-byte tokens that replace each special token in an encoded text.

    Merges can build a special token from ordinary text that spells it out. The tokenizer then
    replaces the special token by the tokens of its bytes. If a byte has no token, only the
    end-of-text token is replaced, because another special token may serve as the unknown token.
    """
    alphabet = {c: n for c in byte_characters() if (n := backend.token_to_id(c)) is not None}
    special = special_texts(backend)
    if len(alphabet) < NUM_BYTES:
        special = {end_of_text: special[end_of_text]}
    return {n: [alphabet[c] for c in text if c in alphabet] for n, text in special.items()}


def cut(parts: Iterable[str], length: int) -> Iterator[str]:
    """Splits a text into pieces of about `length` characters, between words of GPT-2's pattern.

    After `length` characters, a piece ends before the next space or line break that follows a
    non-space. If the next `LONGEST_WORD` characters contain no such boundary, the piece ends
    between two characters of different classes (ASCII letter, digit, other). The place between a
    character of class other and a following letter, as in "'s", is not such a boundary. Splitting
    before a space or line break, or between classes, does not change the tokens. If neither
    boundary exists, the piece ends after `length + LONGEST_WORD` characters, where the tokens may
    change.

    Args:
        parts: Strings of any length, whose concatenation is the text. The lengths of the strings do
            not affect the result.
        length: Minimum length of all pieces except the last.
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
