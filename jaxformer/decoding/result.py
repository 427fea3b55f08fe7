"""The result of `generate`, assembled from the results of its blocks of steps."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

WEIGHTS = "attention.weights"


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
        tokens: int [batch, max_new_tokens], 0 after the end of a row.
        lengths: int [batch], number of new tokens, the stop token included.
        log_probs: float32 [batch, max_new_tokens], log P of each token under the model, before
            temperature and truncation, 0 after the end.
        captured: {name: [layers, batch, max_new_tokens, …]}, entry t from the pass that predicted
            token t, 0 after the end. Points outside of the layers have no layer axis. The keys of
            "attention.weights" are the positions of the row, prompt first. Points of an encoder,
            which reads once, are [layers, sources, …].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    captured: dict[str, np.ndarray]


class Block(NamedTuple):
    """Results of several steps.

    Attributes:
        tokens: int [batch, steps], −1 after the end of a row.
        log_probs: float32 [batch, steps].
        captured: {name: [steps, …]}.
    """

    tokens: jax.Array
    log_probs: jax.Array
    captured: dict[str, Array]


def last_token(captured: Mapping[str, Array], slots: int | None) -> dict:
    """Returns the captured values at the last token of a pass.

    Attention weights are padded to all `slots` of the cache.
    """
    found = {name: x[..., -1, :] for name, x in captured.items()}
    if WEIGHTS in found and slots is not None:
        found[WEIGHTS] = _with_keys(jnp.pad, found[WEIGHTS], slots)
    return found


def _with_keys(pad: Callable[..., Any], weights: Any, num_keys: int) -> Any:
    """Returns attention weights over `num_keys` keys, padded with 0."""
    missing = num_keys - weights.shape[-1]
    return pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, missing)])


def new_tokens(tokens: Int[np.ndarray, "batch steps"], room: int) -> list[list[int]]:
    """Returns the first `room` tokens of each row of a block, up to the end of the row."""
    return [[int(token) for token in row[:room] if token >= 0] for row in tokens]


def collected(
    found: list[Block], max_new_tokens: int, layer_points: Collection[str], num_keys: int
) -> Generation:
    """Concatenates blocks.

    Args:
        found: the blocks, in order.
        max_new_tokens: number of tokens of the result.
        layer_points: names of captured values that have a layer axis.
        num_keys: number of keys of the attention weights, of which early blocks have fewer.
    """

    def after_each_other(blocks: list[Any]) -> np.ndarray:
        steps = np.concatenate(blocks)[:max_new_tokens]
        return np.pad(steps, [(0, max_new_tokens - len(steps)), *[(0, 0)] * (steps.ndim - 1)])

    tokens = after_each_other([block.tokens.T + 1 for block in found]).T - 1  # −1 is the end
    log_probs = after_each_other([block.log_probs.T for block in found]).T
    is_there, captured = tokens >= 0, {}
    for name in found[0].captured:
        blocks = [block.captured[name] for block in found]
        if name == WEIGHTS:
            blocks = [_with_keys(np.pad, x, num_keys) for x in blocks]
        x = after_each_other(blocks)
        batch_axis = 1 if name in layer_points else 0
        x = np.moveaxis(x, 0, batch_axis + 1)
        mask = is_there.reshape(*is_there.shape, *[1] * (x.ndim - batch_axis - 2))
        captured[name] = np.where(mask, x, 0)
    return Generation(np.maximum(tokens, 0), is_there.sum(axis=1), log_probs, captured)


def first_rows(
    generation: Generation, batch_size: int, layer_points: Collection[str]
) -> Generation:
    """Returns the first `batch_size` rows; the remaining ones only fill a bucket of batch sizes."""
    captured = {
        name: x[:, :batch_size] if name in layer_points else x[:batch_size]
        for name, x in generation.captured.items()
    }
    tokens, lengths, log_probs, _ = generation
    first = slice(batch_size)
    return Generation(tokens[first], lengths[first], log_probs[first], captured)


def by_position(captured: Mapping[str, np.ndarray], lengths: list[int], width: int) -> dict:
    """Returns the attention weights with the positions of each row as keys.

    Args:
        captured: {name: value}.
        lengths: number of prompt tokens of each row; they end at slot `width - 1`.
        width: number of slots of the prompts.
    """
    if WEIGHTS not in captured:
        return {}
    weights, found = captured[WEIGHTS], np.zeros_like(captured[WEIGHTS])
    for row, length in enumerate(lengths):
        row_weights = weights[:, row, ..., width - length :]
        found[:, row, ..., : row_weights.shape[-1]] = row_weights
    return {WEIGHTS: found}
