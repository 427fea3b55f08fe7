"""Windows of a stream of tokens: shuffled ones to train on; others that score each token once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from jaxformer.training.batch import Batch
from jaxformer.training.tokens import fingerprint


class WindowBatches:
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
        self._identity = {**sizes, "corpus": fingerprint([np.ascontiguousarray(tokens)])}
        self._starts = functools.lru_cache(maxsize=2)(self._starts)
        dataset = grain.MapDataset.range(sys.maxsize).map(self._read)
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(in_this_thread))

    def __iter__(self) -> WindowBatches:
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


def evaluation_windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[Batch]:
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
        window = Batch(
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
) -> Iterator[Batch]:
    """The evaluation windows of all documents, in batches of one shape [batch_size, length].

    Each document is a sequence of tokens that begins with the end-of-text. The last batch is
    filled with rows of padding, whose weights and segments are 0.

    Errors: ``ValueError`` for a batch size below 1, and as ``evaluation_windows``.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is not accepted; at least 1 is")
    rows: list[Batch] = []
    for document in documents:
        for window in evaluation_windows(document, length, stride):
            rows.append(window)
            if len(rows) == batch_size:
                yield _stacked(rows)
                rows = []
    if rows:
        padding = jax.tree.map(np.zeros_like, rows[0])
        rows += [padding] * (batch_size - len(rows))
        yield _stacked(rows)


def _stacked(rows: Sequence[Batch]) -> Batch:
    """Rows [length] as one batch."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)
