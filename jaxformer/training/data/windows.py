"""Windows of a token stream: shuffled for training, and in order to score each token once."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.training.batch import WHOLE, Batch, Ids, Share

# Number of windows that are shuffled together. Such a block has windows from the whole text. Only
# the order of one block is in memory, not that of all windows of a large text.
BLOCK = 1 << 20


class WindowBatches(Iterator[Batch[np.ndarray]]):
    """Endless iterator over batches of shuffled windows, int32 [accumulate, batch_size, length].

    The stream is a ring: its last token is followed by its first. Each epoch rotates the ring by a
    random offset, divides it into windows of ``length`` targets and shuffles them. So every token
    is a target once per epoch, except for a remainder shorter than a window. The remainder is at
    another place in each epoch. A batch may hold the end of one epoch and the start of the next, so
    no window is dropped. The order depends only on the tokens, the length, the batch size and the
    seed. So the number of the next batch is the whole state of the iterator.

    With ``starts``, each document in a window has a separate segment: its positions begin at 0, and
    it attends to no other document. A document that crosses the end of a window continues in
    another window as if it began there. The remainder of an epoch is padded to a full window, so
    every token is a target exactly once per epoch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        accumulate: int = 1,
        starts: np.ndarray | None = None,
        share: Share = WHOLE,
    ):
        """Prepares to read batches.

        Args:
            tokens: int [num_tokens].
            length: Targets per window.
            batch_size: Windows per micro-batch.
            seed: The seed of the order.
            accumulate: Micro-batches per batch.
            starts: int [num_documents], ascending from 0: the indices in ``tokens`` where documents
                start. None: windows ignore documents.
            share: The rows of each micro-batch to read.

        Raises:
            ValueError: A size is below 1, the seed is negative, or there are fewer than
                ``length + 1`` tokens.
        """
        sizes = {"length": length, "batch_size": accumulate * batch_size, "seed": seed}
        for name, least in (("length", 1), ("batch_size", 1), ("seed", 0)):
            if sizes[name] < least:
                raise ValueError(f"{name} is {sizes[name]}; it must be at least {least}")
        tokens = np.asarray(tokens)
        if len(tokens) < length + 1:
            raise ValueError(
                f"tokens: {len(tokens)} of them are fewer than the {length + 1} of one window of "
                f"length {length}; give more text or a smaller length"
            )
        whole = len(tokens) // length
        self.num_windows = whole if starts is None else -(-len(tokens) // length)
        self._tokens, self._length, self._seed, self._starts = tokens, length, seed, starts
        self._rows, self._accumulate = share.rows(batch_size, accumulate), accumulate
        digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).digest()
        corpus = hashlib.blake2b(digest, digest_size=16).hexdigest()  # as earlier versions wrote it
        documents = None if starts is None else len(starts)
        self._identity = {**sizes, "corpus": corpus, "documents": documents}
        self._block = functools.lru_cache(maxsize=2)(self._block)
        self._number = 0  # of the next batch

    def __next__(self) -> Batch[np.ndarray]:
        """Returns the next batch."""
        batch = self._read(self._number)
        self._number += 1
        return batch

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the only shape of batch."""
        return [jax.eval_shape(lambda x: x, self._read(0))]

    def state(self) -> dict[str, Any]:
        """Returns the number of batches so far and a description of the data, for JSON.

        It does not depend on the rows that are read.
        """
        return {**self._identity, "iterator": {"next_index": self._number}}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in ``state``, so that the same batches follow.

        Raises:
            ValueError: ``state`` has other tokens, documents, length, batch size or seed.
        """
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise ValueError(
                    f"state: its {name} is {state.get(name)!r}, but here it is {here!r}; "
                    "the data order can only be resumed unchanged"
                )
        self._number = state["iterator"]["next_index"]

    def _read(self, index: int) -> Batch[np.ndarray]:
        """Returns the rows of the batch with this number."""
        at, left = self._at(index)
        rows = self._tokens.take(at).astype(np.int32)
        inputs, targets = rows[..., :-1], rows[..., 1:]
        if self._starts is None:
            return Batch(inputs, targets)
        real = np.arange(self._length) < left
        segments = document_segments(self._starts, at[..., :-1]) * real
        return Batch(inputs, targets, real.astype(np.float32), segments)

    def places(self, index: int) -> np.ndarray:
        """Returns the indices in ``tokens`` of a batch: its inputs and, last, each final target.

        Args:
            index: The number of the batch.

        Returns:
            int [accumulate, rows, length + 1].
        """
        return self._at(index)[0]

    def _at(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `places`, and the number of targets from each row's start to the epoch's end.

        The second array has the shape [accumulate, rows, 1].
        """
        first = index * self._identity["batch_size"]
        epoch, place = np.divmod(first + self._rows, self.num_windows)
        found = np.array([self._window(*at) for at in zip(epoch, place, strict=True)])
        turn, window = found.T.reshape(2, self._accumulate, -1, 1)
        at = turn + self._length * window + np.arange(self._length + 1)
        return at % len(self._tokens), len(self._tokens) - self._length * window

    def _window(self, epoch: int, place: int) -> tuple[int, int]:
        """Returns the rotation of an epoch, and the number of the window at a place in it."""
        blocks = -(-self.num_windows // BLOCK)
        size, larger = divmod(self.num_windows, blocks)  # the first blocks have one more
        if place < larger * (size + 1):
            block, inside = divmod(place, size + 1)
        else:
            block, inside = divmod(place - larger, size)
        turn, order = self._block(int(epoch), int(block), blocks)
        return turn, block + blocks * int(order[inside])

    def _block(self, epoch: int, block: int, blocks: int) -> tuple[int, np.ndarray]:
        """Returns the rotation of an epoch, and the order of a block of its windows.

        The block has the windows whose number modulo `blocks` is `block`. NumPy guarantees only
        the raw words of its generators to stay the same in future versions.
        """
        size, larger = divmod(self.num_windows, blocks)
        words = self._words(epoch, block * size + min(block, larger), size + (block < larger))
        turn = int(self._words(epoch, self.num_windows, 1)[0]) % len(self._tokens)
        return turn, np.argsort(words, kind="stable")

    def _words(self, epoch: int, start: int, count: int) -> np.ndarray:
        """Returns `count` random words of an epoch from `start` on, uint64 [count].

        Philox generates four words at a time.
        """
        random = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        random.advance(start // 4)
        return random.random_raw(start % 4 + count)[start % 4 :]


def places_in_documents(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the position within its document of each token of a stream.

    Args:
        starts: Indices in the stream where documents start, ascending from 0.
        places: Indices of tokens in the stream, of any shape.

    Returns:
        The number of tokens of the same document before each token, of the shape of `places`.
    """
    return places - starts[np.searchsorted(starts, places, side="right") - 1]


def document_segments(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the number of each token's document within its row, from 1, int32 [*batch, length].

    Args:
        starts: Indices in a stream where documents start, ascending from 0.
        places: Indices of each row's tokens in the stream, int [*batch, length].
    """
    begins = places_in_documents(starts, places) == 0
    begins[..., 0] = True
    return begins.cumsum(axis=-1, dtype=np.int32)


class EvaluationWindows:
    """Windows that score each token of each document once, as batches of one row, [1, length].

    The first token of a document is context only; its other tokens are targets. Windows start
    ``stride`` tokens apart, and each scores the targets that no earlier window has scored. So after
    the first window, more than ``length - stride`` tokens precede each target. A document of n
    targets takes 1 + ceil((n - length) / stride) windows, or one if n <= length. A window is
    created when it is read.
    """

    def __init__(self, documents: Sequence[Ids], length: int, stride: int):
        """Counts the windows of each document.

        Args:
            documents: The tokens of each document.
            length: Targets per window.
            stride: The distance between the starts of two windows.

        Raises:
            ValueError: `stride` is not in 1 … `length`.
        """
        if not 1 <= stride <= length:
            raise ValueError(f"stride is {stride}; it must be in 1 … window length ({length})")
        self._documents, self._length, self._stride = documents, length, stride
        targets = np.array([len(document) - 1 for document in documents], int)
        beyond = np.maximum(targets - length, 0)
        self._ends = np.cumsum((targets > 0) + -(-beyond // stride))

    def __len__(self) -> int:
        """Returns the number of windows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Batch[np.ndarray]:
        """Returns a window as a batch of one row."""
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
