"""Reads a text and cuts windows for training and scoring."""

from itertools import islice
from pathlib import Path

import numpy as np
from record import Parser, at_least, picture

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.training.batch import Batch
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.objectives import summed_loss


def text_parser(description: str, steps: int, least: int, name: str) -> Parser:
    """Returns the command line of an experiment that trains on a text and draws a picture.

    Args:
        description: The module's docstring.
        steps: Default number of training steps.
        least: Smallest number of steps that is accepted.
        name: Default path of the picture.
    """
    parser = Parser(description)
    parser.add_argument(
        "text", nargs="*", type=Path, help="files and folders; default: the standard library"
    )
    parser.add_argument("--steps", type=at_least(least), default=steps)
    parser.add_argument("--picture", type=picture, default=name)
    return parser


def read_windows(paths: list[Path], vocab_size: int, length: int, number: int):
    """Reads texts, or the standard library's source, and trains a tokenizer.

    The tokenizer learns from every fourth training document.

    Returns:
        (tokenizer, training ids, `number` held-out windows, bytes per token)
    """
    documents = read_documents(paths)[0] if paths else standard_library()
    train, held_out = split(documents, *DEFAULT_SPLIT)
    tokenizer = ByteTokenizer.train(
        (document.text for document in islice(train, 0, None, 4)), vocab_size
    )

    def stream(documents):
        sequences = tokenizer.encode_many(document.text for document in documents)
        return np.concatenate(
            [[tokenizer.end_of_text, *sequence] for sequence in sequences]
        ).astype(np.int32)

    ids, other = stream(train), stream(held_out)
    check_length(ids, length)
    size = sum(document.num_bytes for document in held_out) / len(other)
    return tokenizer, ids, evenly(other, length, number), size


def evenly(ids, length: int, number: int):
    """Returns `number` evenly spaced windows of length + 1 ids."""
    check_length(ids, length)
    starts = np.linspace(0, len(ids) - length - 1, number).astype(int)
    return ids[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def at_random(random, ids, length: int, shape: tuple[int, ...]):
    """Returns windows of length + 1 ids from random positions, [*shape, length + 1]."""
    starts = random.integers(0, len(ids) - length, (*shape, 1))
    return ids[starts + np.arange(length + 1)].astype(np.int32)


def check_length(ids, length: int) -> None:
    """Raises ValueError if the text is shorter than one window."""
    if len(ids) <= length:
        raise ValueError(
            f"the training or held-out text has {len(ids)} tokens; one window needs {length + 1}"
        )


def batches(random, ids, length: int, shape: tuple[int, ...]):
    """Yields random batches without end; inputs and targets have the shape [*shape, length]."""
    while True:
        sequences = at_random(random, ids, length, shape)
        yield Batch(sequences[..., :-1], sequences[..., 1:])


def loss(model, params, windows):
    """Computes the loss in nats per token."""
    batch = Batch(windows[:, :-1], windows[:, 1:])
    return summed_loss(model, params, batch) / batch.targets.size
