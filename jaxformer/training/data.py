"""From text to batches: tokens in a memory-mapped file, windows of them for training and scoring.

A stream of tokens is ``[end_of_text] + document + [end_of_text] + document + ...``: the token in
front of a document lets its first byte be predicted, and ends the document before.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.corpus import Document

_FORMAT = "jaxformer tokens 1"
_HEADER_BYTES = 1024
_GROUP_CHARACTERS = 1 << 22


class TokenStream(NamedTuple):
    """A tokenised corpus and what it was made from."""

    ids: np.ndarray  # uint16 or uint32 [num_tokens], mapped from disk
    num_documents: int
    num_bytes: int  # UTF-8 bytes of text, without the ends of text
    tokenizer: str  # fingerprint of the tokenizer
    documents: str  # fingerprint of the documents, in order

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: all but each document's first, the end of the one before."""
        return len(self.ids) - self.num_documents


class Batch(NamedTuple):
    """Windows for training, int32 [batch, length]: output i of ``inputs`` is to be target i."""

    inputs: np.ndarray
    targets: np.ndarray


class EvaluationBatch(NamedTuple):
    """Windows for scoring, each [batch, length]."""

    inputs: np.ndarray  # int32
    targets: np.ndarray  # int32
    weights: np.ndarray  # float32: 1 where a target is scored; over all batches, once each
    segments: np.ndarray  # int32: 1 for tokens, 0 for padding


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, path: str | Path
) -> TokenStream:
    """Tokenises documents into a file at ``path``, or reuses it if it was made from the same.

    The file is a line of JSON padded to 1024 bytes, then the ids, little-endian, in two bytes
    each while the vocabulary fits in them and in four otherwise. It appears whole or not at all.

    Errors: ``ValueError`` if there are no documents.
    """
    documents = list(documents)
    if not documents:
        raise ValueError("documents: there are none to tokenise")
    header: dict[str, Any] = {
        "format": _FORMAT,
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "num_documents": len(documents),
        "num_bytes": sum(document.num_bytes for document in documents),
        "tokenizer": tokenizer.fingerprint,
        "documents": _fingerprint(document.text.encode() for document in documents),
    }
    if (existing := _read_header(path)) and header.items() <= existing.items():
        return open_tokens(path)

    unfinished = Path(f"{path}.unfinished-{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(b" " * _HEADER_BYTES)
            num_tokens = 0
            for ids in _encode(documents, tokenizer):
                np.asarray(ids, header["dtype"]).tofile(file)
                num_tokens += len(ids)
            file.seek(0)
            line = json.dumps({**header, "num_tokens": num_tokens})
            file.write(line.encode().ljust(_HEADER_BYTES - 1) + b"\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return open_tokens(path)


def open_tokens(path: str | Path) -> TokenStream:
    """Maps a file of ``write_tokens`` into memory, read only.

    Errors: ``ValueError`` naming ``path`` if it is missing, of another kind, or cut short.
    """
    header = _read_header(path)
    if header is None:
        raise ValueError(f"{path}: not a file of tokens; write_tokens makes one")
    return TokenStream(
        ids=np.memmap(path, header["dtype"], "r", _HEADER_BYTES, (header["num_tokens"],)),
        **{name: header[name] for name in TokenStream._fields[1:]},
    )


class Batches:
    """Shuffled windows of a token stream, batch after batch, without end.

    The stream is taken as a ring: its end meets the end-of-text at its start. In each epoch the
    ring is turned by a new random amount and cut into ``num_windows = num_tokens // length``
    windows of ``length`` targets each, which come in a new random order. So in an epoch every
    token is a target once, but for a remainder shorter than a window which falls elsewhere each
    time. Windows come out in epoch order and a batch may hold the end of one epoch and the start
    of the next: nothing is dropped, however few the windows. What comes is a function of tokens,
    length, batch size and seed alone. Reading is by ``grain``, in this thread.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch_size: int, seed: int = 0):
        """Batches of ``tokens``, int [num_tokens].

        Errors: ``ValueError`` for a size below 1, a negative seed, or fewer than ``length + 1``
        tokens.
        """
        sizes = {"length": length, "batch_size": batch_size, "seed": seed}
        for name, value in sizes.items():
            least = 0 if name == "seed" else 1
            if value < least:
                raise ValueError(f"{name}: {value} is not accepted; at least {least} is")
        tokens = np.asarray(tokens)
        if len(tokens) < length + 1:
            raise ValueError(
                f"tokens: {len(tokens)} of them are fewer than the {length + 1} of one window of "
                f"length {length}; give more text or a smaller length"
            )
        self.num_windows = len(tokens) // length
        self._tokens, self._length, self._batch_size, self._seed = tokens, length, batch_size, seed
        self._identity = {**sizes, "corpus": _fingerprint([np.ascontiguousarray(tokens)])}
        self._starts = functools.lru_cache(maxsize=2)(self._starts)
        dataset = grain.MapDataset.range(sys.maxsize).map(self._read)
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(in_this_thread))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, for JSON: how many batches were given, and of what."""
        return {**self._identity, "iterator": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes where ``state`` was taken, so that the next batch is the one that came next there.

        Errors: ``ValueError`` if it was taken from other tokens, length, batch size or seed.
        """
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise ValueError(
                    f"state: its {name} is {state.get(name)!r}, but here it is {here!r}; "
                    "the data order can only be resumed unchanged"
                )
        self._iterator.set_state(dict(state["iterator"]))

    def _read(self, index: int) -> Batch:
        """The batch with a given number."""
        place = index * self._batch_size + np.arange(self._batch_size)
        epoch, place = np.divmod(place, self.num_windows)
        epochs = range(epoch[0], epoch[-1] + 1)
        starts = np.concatenate([self._starts(number)[place[epoch == number]] for number in epochs])
        at = starts[:, None] + np.arange(self._length + 1)
        rows = self._tokens.take(at, mode="wrap").astype(np.int32)
        return Batch(rows[:, :-1], rows[:, 1:])

    def _starts(self, epoch: int) -> np.ndarray:
        """Where the windows of an epoch begin, in the order in which they come, [num_windows].

        grain has a shuffle, but one which for a hundred windows takes a millisecond for each,
        and by which epoch e of seed s is epoch e - 1 of seed s + 1. And of NumPy's random
        functions only the raw words are promised to stay what they are.
        """
        seed = np.random.SeedSequence([self._seed, epoch])
        words = np.random.Philox(seed).random_raw(self.num_windows + 1)
        turn = int(words[-1]) % len(self._tokens)
        return turn + self._length * np.argsort(words[:-1], kind="stable")


def evaluation_windows(
    tokens: Sequence[int], length: int, stride: int
) -> Iterator[EvaluationBatch]:
    """Windows that score each token of a document once, as arrays [length].

    The first of ``tokens`` (the end-of-text) is context alone; the others are targets. Windows
    start ``stride`` apart and score what no window before them did, so past the first window
    each target is predicted from more than ``length - stride`` tokens. A document of n targets
    takes 1 + ceil((n - length) / stride) windows, or one if n <= length.

    Errors: ``ValueError`` unless 1 <= stride <= length.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride: {stride} is not accepted; 1 to the window length {length} is")
    tokens = np.asarray(tokens, np.int32)
    num_targets = len(tokens) - 1
    start = scored = 0
    while scored < num_targets:
        size = min(length, num_targets - start)
        window = EvaluationBatch(
            inputs=np.zeros(length, np.int32),
            targets=np.zeros(length, np.int32),
            weights=np.zeros(length, np.float32),
            segments=np.zeros(length, np.int32),
        )
        window.inputs[:size] = tokens[start : start + size]
        window.targets[:size] = tokens[start + 1 : start + size + 1]
        window.weights[scored - start : size] = 1
        window.segments[:size] = 1
        yield window
        scored = start + size
        start += stride


def evaluation_batches(
    documents: Iterable[Sequence[int]], length: int, stride: int, batch_size: int
) -> Iterator[EvaluationBatch]:
    """The evaluation windows of all documents, in batches of one shape [batch_size, length].

    Each document is a sequence of tokens that begins with the end-of-text. The last batch is
    filled with rows of padding, whose weights and segments are 0.

    Errors: ``ValueError`` for a batch size below 1, and as ``evaluation_windows``.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is not accepted; at least 1 is")
    rows: list[EvaluationBatch] = []
    for document in documents:
        for window in evaluation_windows(document, length, stride):
            rows.append(window)
            if len(rows) == batch_size:
                yield EvaluationBatch(*map(np.stack, zip(*rows, strict=True)))
                rows = []
    if rows:
        padding = EvaluationBatch(*map(np.zeros_like, rows[0]))
        rows += [padding] * (batch_size - len(rows))
        yield EvaluationBatch(*map(np.stack, zip(*rows, strict=True)))


def _encode(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The stream of tokens, in parts: some MB of text at a time, whatever the documents' sizes."""
    group: list[tuple[bool, str]] = []
    size = 0
    pieces = (
        (number == 0, piece)
        for document in documents
        for number, piece in enumerate(tokenizer.pieces(document.text))
    )
    for begins, piece in pieces:
        group.append((begins, piece))
        size += len(piece)
        if size > _GROUP_CHARACTERS:
            yield from _encode_group(group, tokenizer)
            group, size = [], 0
    yield from _encode_group(group, tokenizer)


def _encode_group(group: Sequence[tuple[bool, str]], tokenizer: Tokenizer) -> Iterator[list[int]]:
    encoded = tokenizer.encode_many(piece for _, piece in group)
    for (begins, _), ids in zip(group, encoded, strict=True):
        yield [tokenizer.end_of_text, *ids] if begins else ids


def _fingerprint(parts: Iterable[Any]) -> str:
    """Digest of the parts and of where they are divided."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(hashlib.blake2b(part, digest_size=16).digest())
    return digest.hexdigest()


def _read_header(path: str | Path) -> dict[str, Any] | None:
    """The header of a file of tokens, or None if there is no such file of the size it states."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            size = _HEADER_BYTES + np.dtype(header["dtype"]).itemsize * header["num_tokens"]
            if header["format"] == _FORMAT and os.fstat(file.fileno()).st_size == size:
                return header
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
