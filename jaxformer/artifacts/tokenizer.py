"""Interface of all tokenizers, their limit of ids, and their lowercasing copies.

A tokenizer may have more tokens than its model, if somebody added tokens without resizing the
model's embeddings. Looking up such an id gives NaN. So `bind` sets the limit of a tokenizer that
is read together with a model, and encoding a text with a larger id raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar, runtime_checkable

import tokenizers
from tokenizers import normalizers

from jaxformer.models.config.check import check_fields


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens.

    Attributes:
      stop_tokens: Each of these ends a text; the first one is `end_of_text`.
      begin: Begins a text.
      start: Begins the decoder's input.
      pad: Pads a batch.
    """

    stop_tokens: tuple[int, ...] = ()
    begin: int | None = None
    start: int | None = None
    pad: int | None = None

    def __post_init__(self):
        """Checks the types of the fields."""
        check_fields(self)


class TextStream(Protocol):
    """Decoder for ids that arrive one after another."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, perhaps none."""

    def flush(self) -> str:
        """Returns the remaining text and starts afresh."""


@runtime_checkable
class Tokenizer(Protocol):
    """Encodes text to token ids and decodes them.

    Attributes:
      vocab_size: One more than the largest id.
      mask_token: The id that stands for a hidden token, or None.
      before: The ids that the template puts before a text.
      after: The ids that the template puts after a text.
      id_limit: Number of ids of the model, set by `bind`, or None.
    """

    vocab_size: int
    mask_token: int | None
    before: Sequence[int]
    after: Sequence[int]
    id_limit: int | None

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a text, None if it is unknown."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids each of which ends a text."""

    @property
    def special(self) -> SpecialTokens | None:
        """The special ids that ``tokenizer.json`` does not name; None if there are none."""

    @property
    def why_lossy(self) -> str | None:
        """Why ``decode(encode(text))`` may differ from ``text``; None if it never does."""

    @property
    def lossless(self) -> bool:
        """Whether ``decode(encode(text))`` is ``text`` for every text."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tokenizer: equal ones encode every text to the same ids."""

    @property
    def text_ids(self) -> list[int]:
        """The ids of text in ascending order: all but those of special tokens."""

    @property
    def special_ids(self) -> Iterable[int]:
        """The ids that stand next to a text, or end one."""

    @property
    def opening(self) -> list[int]:
        """The ids that begin a text to generate or to score.

        The model needs at least one token before the first token that it predicts.

        Raises:
          ValueError: If no such token is known.
        """

    @property
    def decoder_opening(self) -> list[int]:
        """The ids that begin the decoder's input, after a source was read."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text without its template. The model's limit of ids is not checked.

        Raises:
          ValueError: If the text has a lone surrogate, which has no UTF-8.
        """

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """Encodes each text, in parallel.

        Raises:
          ValueError: If a text is not Unicode, or has a token that the model lacks (see
            `id_limit`). The message has the token and its id.
        """

    def encode_source(self, text: str) -> list[int]:
        """Encodes a source text, with the tokens that the template puts around it."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; special tokens decode to the empty text."""

    def stream(self, before: Iterable[int] = ()) -> TextStream:
        """Returns a decoder for ids that arrive one after another, following those of `before`."""

    def pieces(self, parts: Iterable[str]) -> Iterator[str]:
        """Divides a text into pieces that are encoded one by one.

        Args:
          parts: The text, in parts of any size.
        """

    def normalized(self, text: str) -> str:
        """Returns the text after normalization, for example in lower case."""

    def name_of(self, token: int) -> str:
        """Returns the text of a token in the vocabulary."""

    def with_backend(self, backend: tokenizers.Tokenizer) -> Self:
        """Returns a tokenizer with the same special ids that encodes with `backend`."""

    def to_json(self) -> str:
        """Returns the content of ``tokenizer.json``."""

    def save(self, path: str | Path) -> None:
        """Writes ``tokenizer.json`` to ``path``, atomically."""


AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer)


def bind(tokenizer: AnyTokenizer, vocab_size: int) -> AnyTokenizer:
    """Binds a tokenizer to a model and returns it.

    Args:
      tokenizer: The tokenizer, whose `id_limit` is set. A mask token that the model lacks is
        dropped.
      vocab_size: Number of ids of the model.

    Raises:
      ValueError: If the model lacks a special id that every text needs.
    """
    tokenizer.id_limit = vocab_size
    if tokenizer.mask_token is not None and tokenizer.mask_token >= vocab_size:
        tokenizer.mask_token = None
    for token in tokenizer.special_ids:
        check_ids([[token]], vocab_size, tokenizer.name_of, "tokenizer: its special")
    return tokenizer


def check_ids(
    rows: Iterable[Sequence[int]],
    id_limit: int,
    name_of: Callable[[int], str],
    what: str = "text: its",
) -> None:
    """Checks that all ids are below the limit.

    Args:
      rows: Sequences of token ids.
      id_limit: Number of ids of the model.
      name_of: Returns the text of a token, for the message.
      what: Start of the message.

    Raises:
      ValueError: For the first id that the model lacks. The message has the token and its id.
    """
    for row in rows:
        if row and max(row) >= id_limit:
            token = next(x for x in row if x >= id_limit)
            raise ValueError(
                f"{what} token {name_of(token)!r} has the id {token}; the model's vocab_size is "
                f"{id_limit}, so its ids are 0 to {id_limit - 1}"
            )


def lowercased(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that lowercases every text first.

    The Lowercase step is part of the copy's tokenizer.json. A tokenizer that already lowercases is
    returned unchanged.
    """
    if lowers_case(tokenizer):
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    lower = tokenizer.with_backend(backend)
    return lower if tokenizer.id_limit is None else bind(lower, tokenizer.id_limit)


def lowers_case(tokenizer: Tokenizer) -> bool:
    """Returns whether the tokenizer lowercases every text."""
    return _lowers(json.loads(tokenizer.to_json())["normalizer"])


def _lowers(normalizer: dict | None) -> bool:
    """Returns whether a normalizer of a tokenizer.json, or any step in it, lowercases."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(map(_lowers, normalizer["normalizers"]))
    return normalizer["type"] == "Lowercase" or normalizer.get("lowercase", False)
