"""Windows of a token stream: shuffled for training, and in order for evaluation."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.training.batch import WHOLE, Batch, Ids, Share

# Windows are shuffled in blocks of this number of windows, because an array with the indices of all
# windows may not fit into memory. Each such block takes its windows from the whole text.
BLOCK = 1 << 20


class WindowBatches(Iterator[Batch[np.ndarray]]):
    """Endless iterator over batches of shuffled windows, int32 [accumulate, batch_size, length].

    The stream is circular: the first token follows the last. Each epoch rotates the stream by a
    random offset, splits it into windows of ``length`` targets and shuffles the windows. Every
    token is a target once per epoch, except for a remainder shorter than a window. The remainder
    differs between epochs. A batch may contain windows of two epochs, so no window is dropped. The
    order depends only on the tokens, the length, the batch size and the seed. The index of the next
    batch is therefore the whole state of the iterator.

    With ``starts``, each document in a window is a separate segment. The positions of a segment
    begin at 0, and its tokens attend only to the same segment. If a document does not fit into a
    window, the rest of the document becomes a new segment in another window. The remainder of an
    epoch is padded to a full window, so every token is a target exactly once per epoch.
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
        """Initializes the iterator.

        Args:
            tokens: int [num_tokens].
            length: Targets per window.
            batch_size: Windows per micro-batch.
            seed: Seed of the random order.
            accumulate: Micro-batches per batch.
            starts: int [num_documents], ascending from 0: the indices in ``tokens`` at which
                documents start. If None, windows ignore document boundaries.
            share: Which shard of each micro-batch to read.

        Raises:
            ValueError: A size is below 1, the seed is negative, or there are fewer than ``length +
                1`` tokens.
        """
        sizes = {"length": length, "batch_size": accumulate * batch_size, "seed": seed}
        for name, least in (("length", 1), ("batch_size", 1), ("seed", 0)):
            if sizes[name] < least:
                raise ValueError(f"{name} is {sizes[name]}; it must be at least {least}")
        tokens = np.asarray(tokens)
        if len(tokens) < length + 1:
            raise ValueError(
                f"the text has {len(tokens)} tokens, but one window of length {length} needs "
                f"{length + 1}; give more text or a smaller length"
            )
        whole = len(tokens) // length
        self.num_windows = whole if starts is None else -(-len(tokens) // length)
        self._tokens, self._length, self._seed, self._starts = tokens, length, seed, starts
        self._indices, self._accumulate = share.indices(batch_size, accumulate), accumulate
        digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).digest()
        # `digest` is hashed again, because existing checkpoints contain this second hash.
        corpus = hashlib.blake2b(digest, digest_size=16).hexdigest()
        documents = None if starts is None else len(starts)
        self._identity = {**sizes, "corpus": corpus, "documents": documents}
        self._block = functools.lru_cache(maxsize=2)(self._block)
        # Index of the next batch.
        self._number = 0

    def __next__(self) -> Batch[np.ndarray]:
        """Returns the next batch."""
        batch = self._read(self._number)
        self._number += 1
        return batch

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the shape of a batch, which is always the same."""
        return [jax.eval_shape(lambda x: x, self._read(0))]

    def state(self) -> dict[str, Any]:
        """Returns the number of batches so far and a description of the data, as JSON values.

        The returned values do not depend on the shard that this process reads.
        """
        return {**self._identity, "iterator": {"next_index": self._number}}

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the iterator to the position in ``state``.

        Raises:
            ValueError: ``state`` was saved with other tokens, documents, length, batch size or
                seed.
        """
        for name, here in self._identity.items():
            if state.get(name) != here:
                raise ValueError(
                    f"state has {name} {state.get(name)!r}, but this iterator has {here!r}; resume "
                    "with the same data and settings"
                )
        self._number = state["iterator"]["next_index"]

    def _read(self, index: int) -> Batch[np.ndarray]:
        """Returns the batch with this index."""
        at, left = self._at(index)
        windows = self._tokens.take(at).astype(np.int32)
        inputs, targets = windows[..., :-1], windows[..., 1:]
        if self._starts is None:
            return Batch(inputs, targets)
        real = np.arange(self._length) < left
        segment_ids = document_segment_ids(self._starts, at[..., :-1]) * real
        return Batch(inputs, targets, real.astype(np.float32), segment_ids)

    def places(self, index: int) -> np.ndarray:
        """Returns the indices in ``tokens`` of each window's inputs and of its last target.

        Args:
            index: The index of the batch.

        Returns:
            int [accumulate, batch, length + 1].
        """
        return self._at(index)[0]

    def _at(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token indices of a batch, and the remaining number of targets in the epoch.

        Returns:
            (indices, remaining): the result of `places` and, for each window, the number of targets
            from its start to the end of the epoch, int [accumulate, batch, 1].
        """
        first = index * self._identity["batch_size"]
        epoch, place = np.divmod(first + self._indices, self.num_windows)
        found = np.array([self._window(*at) for at in zip(epoch, place, strict=True)])
        turn, window = found.T.reshape(2, self._accumulate, -1, 1)
        at = turn + self._length * window + np.arange(self._length + 1)
        return at % len(self._tokens), len(self._tokens) - self._length * window

    def _window(self, epoch: int, place: int) -> tuple[int, int]:
        """Returns an epoch's rotation offset, and the index of its shuffled window `place`."""
        blocks = -(-self.num_windows // BLOCK)
        # The first `larger` blocks of windows have one more window than the other blocks.
        size, larger = divmod(self.num_windows, blocks)
        if place < larger * (size + 1):
            block, inside = divmod(place, size + 1)
        else:
            block, inside = divmod(place - larger, size)
        turn, order = self._block(int(epoch), int(block), blocks)
        return turn, block + blocks * int(order[inside])

    def _block(self, epoch: int, block: int, blocks: int) -> tuple[int, np.ndarray]:
        """Returns an epoch's rotation offset, and the shuffled order of the windows in a block.

        A block consists of the windows whose index modulo `blocks` is `block`. The order is
        computed from the generator's raw numbers, because future versions of NumPy may change all
        other random functions.
        """
        size, larger = divmod(self.num_windows, blocks)
        words = self._words(epoch, block * size + min(block, larger), size + (block < larger))
        turn = int(self._words(epoch, self.num_windows, 1)[0]) % len(self._tokens)
        return turn, np.argsort(words, kind="stable")

    def _words(self, epoch: int, start: int, count: int) -> np.ndarray:
        """Returns an epoch's random numbers `start` to `start + count - 1`, uint64 [count].

        Philox generates four numbers at a time, so `advance` skips groups of four numbers.
        """
        random = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        random.advance(start // 4)
        return random.random_raw(start % 4 + count)[start % 4 :]


def places_in_documents(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the position of each token within its document.

    Args:
        starts: Indices in the stream at which documents start, ascending from 0.
        places: Indices of tokens in the stream, an array of any shape.

    Returns:
        For each token, the number of previous tokens in the same document.
    """
    return places - starts[np.searchsorted(starts, places, side="right") - 1]


def document_segment_ids(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns the index of each token's document within its sequence, int32 [*batch, length].

    Args:
        starts: Indices in a stream at which documents start, ascending from 0.
        places: Indices of each sequence's tokens in the stream, int [*batch, length].
    """
    begins = places_in_documents(starts, places) == 0
    begins[..., 0] = True
    return begins.cumsum(axis=-1, dtype=np.int32)


class EvaluationWindows:
    """Windows that score every target of every document once, each as a batch [1, length].

    The first token of a document is context; all other tokens are targets. Windows start ``stride``
    tokens apart, and each window scores the targets that no earlier window has scored. After the
    first window, every target has more than ``length - stride`` preceding tokens. A document of n
    targets has 1 + ceil((n - length) / stride) windows, or one window if n <= length. Windows are
    created when they are accessed.
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
        """Returns a window as a batch of one sequence."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        document = int(np.searchsorted(self._ends, number, side="right"))
        tokens = self._documents[document]
        number -= int(self._ends[document - 1]) if document else 0
        start = number * self._stride
        scored = (number > 0) * (start - self._stride + self._length)
        part = np.asarray(tokens[start : start + self._length + 1], np.int32)
        size, (inputs, targets, segment_ids) = (
            len(part) - 1,
            np.zeros((3, 1, self._length), np.int32),
        )
        weights = np.zeros((1, self._length), np.float32)
        inputs[0, :size], targets[0, :size], segment_ids[0, :size] = part[:-1], part[1:], 1
        weights[0, max(0, scored - start) : size] = 1
        return Batch(inputs, targets, weights, segment_ids)
