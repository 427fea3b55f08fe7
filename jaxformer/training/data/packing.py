"""Batches of whole examples, several of which share a sequence.

Each example is a separate segment: its positions begin at 0, and no other example affects its
outputs, neither through attention nor through a recurrent state. An example is never divided.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxformer.artifacts.files import replacing
from jaxformer.training.batch import WHOLE, Batch, Share
from jaxformer.training.data.epochs import EpochBatches, divide, shuffled
from jaxformer.training.data.examples import Example

_FORMAT = "jaxformer examples 1"
_ARRAYS = ("ids", "mask", "starts")
# Examples are added only to this number of newest sequences, so that packing takes linear time.
_OPEN = 16


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples, concatenated in common arrays.

    Attributes:
        ids: The token ids of all examples, uint32 [num_tokens].
        mask: For each token, whether the model learns to predict it, bool [num_tokens].
        starts: The index of each example's first token, int64 [examples].
    """

    ids: np.ndarray
    mask: np.ndarray
    starts: np.ndarray

    @classmethod
    def join(cls, examples: Sequence[Example]) -> Self:
        """Concatenates examples."""
        lengths = [len(example.ids) for example in examples]
        ids = np.fromiter((x for example in examples for x in example.ids), np.uint32)
        mask = np.fromiter((x for example in examples for x in example.mask), bool)
        return cls(ids, mask, np.cumsum([0, *lengths], dtype=np.int64)[:-1])

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.starts)

    def spread(self, number: int) -> "Examples":
        """Returns up to `number` evenly spaced examples."""
        places = np.linspace(0, len(self) - 1, min(number, len(self))).round().astype(int)
        return self.take(places.tolist())

    def take(self, numbers: Iterable[int]) -> "Examples":
        """Returns the examples with these indices."""
        return Examples.join([self[number] for number in numbers])

    def __getitem__(self, number: int) -> Example:
        """Returns an example."""
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.ids)
        place = slice(self.starts[number], end)
        return Example(self.ids[place], self.mask[place])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example."""
        return np.diff(np.append(self.starts, len(self.ids)))

    @property
    def num_targets(self) -> int:
        """The number of tokens that the model learns to predict."""
        firsts = self.mask[self.starts]
        return int(self.mask.sum() - firsts.sum())

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the examples."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.ids, self.mask, self.starts):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def save(self, path: Path, tokenizer: str) -> None:
        """Writes the examples to a file, atomically.

        Args:
            path: The file.
            tokenizer: A fingerprint of the tokenizer.
        """
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, format=_FORMAT, tokenizer=tokenizer, **arrays)

    @classmethod
    def load(cls, path: Path, tokenizer: str) -> Self:
        """Reads the examples that `save` wrote.

        Args:
            path: The file.
            tokenizer: A fingerprint of the tokenizer.

        Raises:
            ValueError: The file is damaged, or was written with another tokenizer.
        """
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                content = {name: arrays[name] for name in ("format", "tokenizer", *_ARRAYS)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} cannot be read as a file of examples: {error}") from None
        if str(content["format"]) != _FORMAT:
            raise ValueError(f"{path} has the format {content['format']}; it must be {_FORMAT}")
        if str(content["tokenizer"]) != tokenizer:
            raise ValueError(f"{path} was written with a different tokenizer than the run's")
        return cls(*(content[name] for name in _ARRAYS))


class PackedBatches(EpochBatches[Batch[np.ndarray], Sequence[list[int]]]):
    """Endless iterator over batches of shuffled examples. Each epoch contains every example once.

    The order depends only on the examples, the sizes and the seed. Empty sequences fill the last
    batch of an epoch.
    """

    def __init__(
        self,
        examples: Examples,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        accumulate: int = 1,
        packs: bool = True,
        share: Share = WHOLE,
    ):
        """Initializes the iterator.

        Args:
            examples: The examples, each with at most ``length + 1`` tokens.
            length: Tokens per sequence.
            batch_size: Sequences per micro-batch.
            seed: Seed of the random order.
            accumulate: Micro-batches per batch.
            packs: Whether several examples share a sequence.
            share: Which shard of each micro-batch to read.

        Raises:
            ValueError: There are no examples, or an example is too long.
        """
        if not len(examples):
            raise ValueError("examples is empty; it must have at least one example")
        lengths = examples.lengths
        if lengths.max() > length + 1:
            raise ValueError(
                f"example {lengths.argmax() + 1} has {lengths.max()} tokens; a sequence holds at "
                f"most {length + 1}"
            )
        self._examples, self._lengths, self._length = examples, lengths, length
        self._batch_size, self._accumulate, self._seed = batch_size, accumulate, seed
        self._packs, self._share = packs, share
        share.indices(batch_size)
        super().__init__()

    def once(self) -> Iterator[Batch[np.ndarray]]:
        """Yields micro-batches [batch, length] that together contain every example once."""
        sequences = self._pack(range(len(self._examples)))
        for chosen in divide(sequences, self._batch_size):
            padding = [[]] * (self._batch_size - len(chosen))
            yield stack_batches(map(self._sequence, [*chosen, *padding]))

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the shape of a batch, which is always the same."""
        return [jax.eval_shape(lambda x: x, self._build([]))]

    def _identity(self) -> dict[str, Any]:
        sizes = {"length": self._length, "batch_size": self._batch_size, "seed": self._seed}
        sizes |= {"accumulate": self._accumulate, "packs": self._packs}
        return {"examples": self._examples.digest, **sizes}

    def _plan_epoch(self, epoch: int) -> list[Sequence[list[int]]]:
        """Returns, for each batch of an epoch, the indices of the examples in each sequence."""
        order = shuffled(len(self._examples), self._seed, epoch)
        return divide(self._pack(order.tolist()), self._accumulate * self._batch_size)

    def _pack(self, order: Iterable[int]) -> list[list[int]]:
        return pack(self._lengths, order, self._length if self._packs else 0)

    def _sequence(self, chosen: list[int]) -> Batch[np.ndarray]:
        return pack_sequence([self._examples[number] for number in chosen], self._length)

    def _build(self, planned: Sequence[list[int]]) -> Batch[np.ndarray]:
        """Returns a batch [accumulate, batch, length], filled up with sequences of padding."""
        places = self._share.indices(self._batch_size, self._accumulate)
        chosen = (planned[place] if place < len(planned) else [] for place in places)
        batch = stack_batches(map(self._sequence, chosen))
        return jax.tree.map(lambda x: x.reshape(self._accumulate, -1, x.shape[-1]), batch)


def pack(lengths: np.ndarray, order: Iterable[int], length: int) -> list[list[int]]:
    """Distributes examples over sequences.

    Each example goes into the first sequence with enough free places among the newest `_OPEN`
    sequences. If there is no such sequence, the example starts a new one.

    Args:
        lengths: The number of tokens of each example. An example of n tokens needs n - 1 places,
            because its last token is only a target.
        order: The indices of the examples, in the order in which they are distributed.
        length: Places per sequence; 0 for one example in each sequence.

    Returns:
        The indices of the examples in each sequence.
    """
    sequences: list[list[int]] = []
    open_sequences: list[tuple[int, list[int]]] = []  # (number of free places, sequence)
    for index in order:
        needed = int(lengths[index]) - 1
        for place, (room, sequence) in enumerate(open_sequences):
            if needed <= room:
                sequence.append(index)
                open_sequences[place] = (room - needed, sequence)
                break
        else:
            sequences.append([index])
            open_sequences = [*open_sequences, (length - needed, sequences[-1])][-_OPEN:]
    return sequences


def pack_sequence(examples: Sequence[Example], length: int) -> Batch[np.ndarray]:
    """Returns one sequence [length] with several examples, each as a separate segment.

    Args:
        examples: The examples, which together need at most `length` places.
        length: The length of the sequence.
    """
    inputs, targets, segment_ids = np.zeros((3, length), np.int32)
    weights, at = np.zeros(length, np.float32), 0
    for number, (ids, mask) in enumerate(examples, 1):
        end = at + len(ids) - 1
        inputs[at:end], targets[at:end] = ids[:-1], ids[1:]
        weights[at:end], segment_ids[at:end] = mask[1:], number
        at = end
    return Batch(inputs, targets, weights, segment_ids)


def stack_batches(sequences: Iterable[Batch[np.ndarray]]) -> Batch[np.ndarray]:
    """Stacks sequences [length] into a batch [batch, length]."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *sequences)
