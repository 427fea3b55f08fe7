"""Windows of a text, to learn from and to be scored on."""

from itertools import islice
from pathlib import Path

import numpy as np
from record import Parser, at_least, picture

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import Batch
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.loss import summed_loss


def text_parser(description: str, steps: int, least: int, name: str) -> Parser:
    """The command line of an experiment that trains on a text, for at least so many steps, and
    draws what came of it, by default under that name."""
    parser = Parser(description)
    parser.add_argument("text", nargs="*", type=Path, help="files and folders; none: the library's")
    parser.add_argument("--steps", type=at_least(least), default=steps)
    parser.add_argument("--picture", type=picture, default=name)
    return parser


def read_windows(paths: list[Path], vocab_size: int, length: int, number: int):
    """(tokenizer, training ids, `number` held-out windows, bytes a token) of texts, or of the
    standard library's source; the tokenizer has learnt from every fourth training document."""
    documents = read_documents(paths)[0] if paths else standard_library()
    train, held_out = split(documents, *DEFAULT_SPLIT)
    tokenizer = Tokenizer.train(
        (document.text for document in islice(train, 0, None, 4)), vocab_size
    )

    def stream(documents):
        rows = tokenizer.encode_many(document.text for document in documents)
        return np.concatenate([[tokenizer.end_of_text, *row] for row in rows]).astype(np.int32)

    ids, other = stream(train), stream(held_out)
    check_length(ids, length)
    size = sum(document.num_bytes for document in held_out) / len(other)
    return tokenizer, ids, evenly(other, length, number), size


def evenly(ids, length: int, number: int):
    """`number` windows of length + 1 ids, spread evenly over a text."""
    check_length(ids, length)
    starts = np.linspace(0, len(ids) - length - 1, number).astype(int)
    return ids[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def at_random(random, ids, length: int, shape: tuple[int, ...]):
    """Windows of length + 1 ids from random places, [*shape, length + 1]."""
    starts = random.integers(0, len(ids) - length, (*shape, 1))
    return ids[starts + np.arange(length + 1)].astype(np.int32)


def check_length(ids, length: int) -> None:
    """ValueError if there is no whole window."""
    if len(ids) <= length:
        raise ValueError(f"the text has {len(ids)} tokens in a part; a window has {length + 1}")


def batches(random, ids, length: int, shape: tuple[int, ...]):
    """Batches of such windows, without end: [*shape, length]."""
    while True:
        rows = at_random(random, ids, length, shape)
        yield Batch(rows[..., :-1], rows[..., 1:])


def loss(model, params, windows):
    """Nats per token."""
    total, count = summed_loss(model, params, Batch(windows[:, :-1], windows[:, 1:]))
    return total / count
