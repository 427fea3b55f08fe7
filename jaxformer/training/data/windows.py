"""Windows of a stream of tokens: shuffled ones to train on; others that score each token once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from jaxformer.training.batch import Batch
from jaxformer.training.data.tokens import fingerprint

# Windows that are shuffled together. Each such block has windows from all over the text; the order
# of a block, but not of all windows of a large text, is in memory.
BLOCK = 1 << 20


class WindowBatches:
    """Shuffled windows of a token stream, batch after batch, without end.

    The stream is taken as a ring: its end meets the end-of-text at its start. In each epoch the
    ring is turned by a new random amount and cut into windows of ``length`` targets each, which
    come in a new random order. So in an epoch every token is a target once, but for a remainder
    shorter than a window which falls elsewhere each time. Windows come out in epoch order and a
    batch may hold the end of one epoch and the start of the next: nothing is dropped, however few
    the windows. What comes is a function of tokens, length, batch size and seed alone. Reading is
    by ``grain``, in this thread.

    With ``end_of_text`` the documents in a window are told apart: each has a segment of its own,
    so that its positions begin at 0 and it sees no other. One that reaches beyond the end of a
    window goes on in another, as if it began there. The remainder comes too, in a window that is
    filled up with padding: in each epoch every token, and every end of text, is a target once.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        rows: np.ndarray | None = None,
        end_of_text: int | None = None,
    ):
        """Batches of ``tokens``, int [num_tokens]. rows: of each batch, those that are read (see
        `Share`); None: all. end_of_text: the token that each document begins with.

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
        whole = len(tokens) // length
        self.num_windows = whole if end_of_text is None else -(-len(tokens) // length)
        self._tokens, self._length, self._batch_size, self._seed = tokens, length, batch_size, seed
        self._rows = np.arange(batch_size) if rows is None else rows
        self._end_of_text = end_of_text
        self._identity = {**sizes, "corpus": fingerprint([np.ascontiguousarray(tokens)])}
        self._identity["end_of_text"] = end_of_text
        self._block = functools.lru_cache(maxsize=2)(self._block)
        dataset = grain.MapDataset.range(sys.maxsize).map(self._read)
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(dataset.to_iter_dataset(in_this_thread))

    def __iter__(self) -> WindowBatches:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, for JSON: how many batches were given, and of what. It is the
        same whatever rows are read."""
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
        """The rows of the batch with a given number."""
        epoch, place = np.divmod(index * self._batch_size + self._rows, self.num_windows)
        turn, window = np.array([self._window(*at) for at in zip(epoch, place, strict=True)]).T
        at = (turn + self._length * window)[:, None] + np.arange(self._length + 1)
        rows = self._tokens.take(at, mode="wrap").astype(np.int32)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self._end_of_text is None:
            return Batch(inputs, targets)
        left = len(self._tokens) - self._length * window  # targets from there to the epoch's end
        real = np.arange(self._length) < left[:, None]
        segments = document_segments(inputs, self._end_of_text) * real
        return Batch(inputs, targets, real.astype(np.float32), segments)

    def _window(self, epoch: int, place: int) -> tuple[int, int]:
        """The turn of an epoch, and the window that comes at a place in it."""
        blocks = -(-self.num_windows // BLOCK)
        size, larger = divmod(self.num_windows, blocks)  # the first blocks have one more
        if place < larger * (size + 1):
            block, inside = divmod(place, size + 1)
        else:
            block, inside = divmod(place - larger, size)
        turn, order = self._block(int(epoch), int(block), blocks)
        return turn, block + blocks * int(order[inside])

    def _block(self, epoch: int, block: int, blocks: int) -> tuple[int, np.ndarray]:
        """The turn of an epoch, and the order of those of its windows whose number leaves the
        remainder `block` on division by `blocks`.

        grain has a shuffle, but one which for a hundred windows takes a millisecond for each,
        and by which epoch e of seed s is epoch e - 1 of seed s + 1. And of NumPy's random
        functions only the raw words are promised to stay what they are.
        """
        size, larger = divmod(self.num_windows, blocks)
        words = self._words(epoch, block * size + min(block, larger), size + (block < larger))
        turn = int(self._words(epoch, self.num_windows, 1)[0]) % len(self._tokens)
        return turn, np.argsort(words, kind="stable")

    def _words(self, epoch: int, start: int, count: int) -> np.ndarray:
        """Those of the random words of an epoch, uint64 [count]; Philox gives four at a time."""
        random = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        random.advance(start // 4)
        return random.random_raw(start % 4 + count)[start % 4 :]


def document_segments(ids: np.ndarray, end_of_text: int) -> np.ndarray:
    """1, 1, 2, 2, …: which document of its row each token is of, int32 [rows, length]; one begins
    with the end of text."""
    begins = ids == end_of_text
    begins[:, 0] = True
    return begins.cumsum(axis=1, dtype=np.int32)


class EvaluationWindows(Sequence):
    """Windows that score each token of each document once, as batches of one row, [1, length].

    A document begins with the end-of-text, which is context alone; its other tokens are targets.
    Windows start ``stride`` apart and score what no window before them did, so past the first
    window each target is predicted from more than ``length - stride`` tokens. A document of n
    targets takes 1 + ceil((n - length) / stride) windows, or one if n <= length. They are made
    when they are asked for.

    Errors: ``ValueError`` unless 1 <= stride <= length.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, stride: int):
        if not 1 <= stride <= length:
            raise ValueError(
                f"stride: {stride} is not accepted; 1 to the window length {length} is"
            )
        self._documents, self._length, self._stride = documents, length, stride
        targets = np.array([len(document) - 1 for document in documents], int)
        beyond = np.maximum(targets - length, 0)
        self._ends = np.cumsum((targets > 0) + -(-beyond // stride))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        document = int(np.searchsorted(self._ends, number, side="right"))
        tokens = self._documents[document]
        number -= int(self._ends[document - 1]) if document else 0
        start = number * self._stride
        scored = (number > 0) * (start - self._stride + self._length)
        part = np.asarray(tokens[start : start + self._length + 1], np.int32)
        size, (inputs, targets, segments) = len(part) - 1, np.zeros((3, 1, self._length), np.int32)
        weights = np.zeros((1, self._length), np.float32)
        inputs[0, :size], targets[0, :size], segments[0, :size] = part[:-1], part[1:], 1
        weights[0, max(0, scored - start) : size] = 1
        return Batch(inputs, targets, weights, segments)


def evaluation_batches(
    documents: Sequence[Sequence[int]], length: int, stride: int, batch_size: int
) -> Iterator[Batch]:
    """The evaluation windows of all documents, in batches of one shape [batch_size, length].

    Each document is a sequence of tokens that begins with the end-of-text. The last batch is
    filled with rows of padding, whose weights and segments are 0.

    Errors: ``ValueError`` for a batch size below 1, and as ``EvaluationWindows``.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is not accepted; at least 1 is")
    windows = EvaluationWindows(documents, length, stride)
    for start in range(0, len(windows), batch_size):
        rows = [windows[n] for n in range(start, min(start + batch_size, len(windows)))]
        rows += [jax.tree.map(np.zeros_like, rows[0])] * (batch_size - len(rows))
        yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
