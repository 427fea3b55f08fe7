"""A byte-level BPE tokenizer: any text in, the same text out.

Text is taken as its UTF-8 bytes, so nothing is unknown and nothing is normalised away:
``decode(encode(text)) == text`` for every string, unless the tokenizer is another's that says why
it cannot promise that. Byte-level BPE is from Radford et al. 2019
("Language Models are Unsupervised Multitask Learners", section 2.2); the work is done by the
``tokenizers`` library and the file on disk is its ``tokenizer.json``.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.artifacts.byte_tokens import special_tokens, spelled, token_bytes
from jaxformer.artifacts.lossless import (
    HARD_TEXTS,
    NUM_BYTES,
    divides_at_spaces,
    lossy_part,
)

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"

# What other people's byte-level vocabularies call it, in the order in which they are looked for.
_NAMES_OF_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")

# Pair counting costs the square of a word's length: one line of base64 would train for hours.
# Longer words are cut for training alone; encoding is not affected.
_LONGEST_TRAINED_WORD = 64

# The encoder keeps some hundred bytes for each token of a text until that text is done, and
# spreads its work over threads by whole texts. So long texts are handed to it in pieces.
_PIECE_LENGTH = 1 << 18
_SAFE_CUT = re.compile(r"(?<=\S)[ \n]")


class Tokenizer:
    """Text to token ids and back, for byte-level BPE.

    Attributes:
      vocab_size: one more than the largest id.
      end_of_text: the id that stands before each document and ends the one before. No text
        encodes to it, not even a text that spells it out, whoever made the tokenizer.
      mask_token: the id that stands for a hidden token; None: there is none.
      why_lossy: None if ``decode(encode(text)) == text`` for every text, as with each that
        ``train`` gives; else which part (of another's, which was loaded) may change a text.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wraps a ``tokenizers.Tokenizer``; ``ValueError`` unless it is byte-level BPE."""
        if not isinstance(backend.model, models.BPE):
            raise ValueError(f"tokenizer: its model is {type(backend.model).__name__}, not BPE")
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                f"tokenizer: its decoder is {type(backend.decoder).__name__}, not ByteLevel"
            )
        names = [name for name in _NAMES_OF_END_OF_TEXT if backend.token_to_id(name) is not None]
        if not names:
            raise ValueError(f"tokenizer: it has none of {', '.join(_NAMES_OF_END_OF_TEXT)}")
        if names[0] not in special_tokens(backend).values():
            backend.add_special_tokens([names[0]])  # no word of a text, and decoded to nothing
        backend.encode_special_tokens = True  # special tokens found in text are ordinary text
        backend.no_truncation()
        backend.no_padding()
        parts = json.loads(backend.to_str())
        self._backend = backend
        self._token_bytes = token_bytes(backend)
        self.end_of_text: int = backend.token_to_id(names[0])
        self.vocab_size: int = len(self._token_bytes)
        self.mask_token: int | None = backend.token_to_id(MASK)
        self._spelled = spelled(backend, self.end_of_text)
        self._may_be_cut = False  # until it is known what the words are
        self.why_lossy: str | None = lossy_part(parts, self._token_bytes) or self._changed_text()
        self._may_be_cut = self.lossless and divides_at_spaces(parts)

    @property
    def lossless(self) -> bool:
        """Whether every text comes back from its tokens."""
        return self.why_lossy is None

    def _changed_text(self) -> str | None:
        """The first hard text that does not come back, in words."""
        added = (token.content for token in self._backend.get_added_tokens_decoder().values())
        texts = [*HARD_TEXTS, *(f"a {content} {content}b" for content in added)]
        for text, ids in zip(texts, self.encode_many(texts), strict=True):
            if self.decode(ids) != text:
                return f"it changes the text {text!r}"
        return None

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        split_digits: bool = False,
        mask: bool = False,
    ) -> Tokenizer:
        """Learns merges from ``texts``; the same texts in the same order give the same tokenizer.

        Id 0 is the end of text, ids 1 to 256 are the bytes, and merges follow in the order in
        which they were learnt, so ``vocab_size=257`` gives one token per byte. A pair seen only
        once is not merged: a small corpus may give fewer than ``vocab_size`` tokens. With
        ``split_digits`` each digit is a token: numbers are read, and written, figure by figure.
        With ``mask`` the last id is a token that stands for a hidden one.

        Errors: ``ValueError`` when ``vocab_size`` is below 257, or 258 with ``mask``.
        """
        least = NUM_BYTES + 1 + mask
        if vocab_size < least:
            raise ValueError(
                f"vocab_size: {vocab_size} is too small; a byte-level tokenizer needs at least "
                f"{least} ({NUM_BYTES} bytes, the end of text{' and the mask' * mask})"
            )
        steps = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
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
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a ``tokenizer.json``; ``ValueError`` naming ``path`` if that cannot be done."""
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ValueError(f"{path}: not a readable byte-level BPE tokenizer: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` at ``path``, whole or not at all."""
        unfinished = Path(f"{path}.unfinished-{os.getpid()}")
        unfinished.write_text(self.to_json(), encoding="utf-8")
        os.replace(unfinished, path)

    def to_json(self) -> str:
        """What ``save`` writes."""
        return self._backend.to_str(pretty=True)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tokenizer: equal ones encode every text to the same ids."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``, without an end of text.

        Errors: ``ValueError`` for a lone surrogate, which has no UTF-8.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """The token ids of each text, in parallel; equal to ``encode`` of one at a time."""
        texts = list(texts)
        pieces = [list(self.pieces([text])) for text in texts]
        flat = list(itertools.chain.from_iterable(pieces))
        try:
            encodings = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        except TypeError:
            _refuse_surrogates(texts)
            raise
        return [
            [token for _ in parts for token in self._spell(next(encodings).ids)] for parts in pieces
        ]

    def _spell(self, ids: list[int]) -> list[int]:
        """The ids, special ones, to which merges may have led, in their bytes."""
        if self._spelled.keys().isdisjoint(ids):
            return ids
        return [part for token in ids for part in self._spelled.get(token, (token,))]

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """A text, which may come in parts, cut where that cannot change its tokens; whole, if it
        is not known where that is."""
        return cut(parts, _PIECE_LENGTH) if self._may_be_cut else iter(["".join(parts)])

    @property
    def opening(self) -> list[int]:
        """What a text begins with that is generated or scored: something must stand before its
        first token."""
        return [self.end_of_text]

    before: tuple[int, ...] = ()
    """the ids that stand before and after a text that a model reads: none"""
    after: tuple[int, ...] = ()

    @property
    def decoder_opening(self) -> list[int]:
        """What is generated after a source has been read begins with this."""
        return [self.end_of_text]

    def encode_source(self, text: str) -> list[int]:
        """The ids of a text that is read as a source."""
        return self.encode(text)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids any of which ends a text."""
        return (self.end_of_text,)

    def stream(self, before: Iterable[int] = ()) -> StreamDecoder:
        """A decoder of ids as they arrive; what stands before them makes no difference here."""
        return StreamDecoder(self)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD, special tokens nothing.

        Errors: ``ValueError`` for an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, possibly a part of a character; none if special."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"ids: {token} is not a token; 0 to {self.vocab_size - 1} are")
        return self._token_bytes[token]


class StreamDecoder:
    """Decodes ids as they arrive, giving out each character once all its bytes are there.

    ``"".join(push(part) for part in parts) + flush()`` equals ``decode`` of all the parts.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """Returns what is left (U+FFFD for an unfinished character) and starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def cut(parts: Iterable[str], length: int) -> Iterator[str]:
    """A text, which may come in parts, in pieces of about so many characters, cut between words.

    No word of GPT-2's has a space or a line break after a non-space (a space can only lead), so a
    word begins at each of those and takes no notice of what stands before it.
    """
    waiting = ""
    for part in parts:
        waiting, start = waiting + part, 0
        while found := _SAFE_CUT.search(waiting, start + length):
            yield waiting[start : found.start()]
            start = found.start()
        waiting = waiting[start:]
    yield waiting


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text: has no UTF-8: {error}") from None
