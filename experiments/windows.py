"""Windows of a text, to learn from and to be scored on."""

import numpy as np

from jaxformer.functional import cross_entropy


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


def loss(model, params, windows):
    """Nats per token."""
    return cross_entropy(model.apply({"params": params}, windows[:, :-1]), windows[:, 1:])
