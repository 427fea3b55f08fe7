"""The texts that a model reads: checked inputs, and batches on which heads are measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.cross_entropy import check_targets
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.models.check import AnyArray, as_array, check_tokens, checked_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch


def read_inputs(
    model: LanguageModel, variables: Variables, tokens: Any, source: Any = None
) -> Inputs:
    """Returns the inputs of a pass over complete sequences, after all checks.

    Args:
        model: any model.
        variables: its variables.
        tokens: ids, int [batch, length].
        source: for a model that reads one, rows of ids of any lengths, or int [batch, source].

    Raises:
        ValueError: an argument is not accepted.
    """
    model.check(variables)
    read = model.read_source(source) or Inputs(None)
    tokens = as_array("tokens", tokens)
    if tokens.ndim == 2 and not tokens.shape[1]:
        raise ValueError(f"tokens are {tokens.shape}; each text needs at least one token")
    inputs = Inputs(tokens, source=read.tokens, source_segments=read.segments)
    return checked_inputs(inputs, model.config)


class Read(NamedTuple):
    """One logit of each text, and what the model reads.

    Attributes:
        inputs: the texts.
        target: the token of the logit.
        position: the position that predicts it, counted from the beginning.
    """

    inputs: Inputs
    target: Int[Array, " batch"]
    position: int | Int[Array, ""]


def read_logits(
    model: LanguageModel, variables: Variables, tokens: Any, target: Any, position: int, source: Any
) -> Read:
    """Returns the inputs of a pass, and which logit of each text to explain, after all checks.

    Args:
        model: any model.
        variables: its variables.
        tokens: ids, int [batch, length].
        target: one id for each text: the token of the logit.
        position: the position that predicts it; negative: counted from the end.
        source: for a model that reads one, the sources.

    Raises:
        ValueError: an argument is not accepted.
    """
    inputs = read_inputs(model, variables, tokens, source)
    batch_size, length = inputs.tokens.shape[:2]
    target, vocab_size = jnp.asarray(as_array("target", target)), model.config.vocab_size
    if target.shape != (batch_size,):
        raise ValueError(f"target is {target.shape}; it must be ({batch_size},), one id per text")
    if (target < 0).any() or (target >= vocab_size).any():
        raise ValueError(f"target is {target}; ids are 0 … {vocab_size - 1}")
    if whole_number("position", position, -length) >= length:
        raise ValueError(f"position is {position}; the texts have {length} tokens")
    return Read(inputs, target, position % length)


def next_token_batch(
    model: LanguageModel,
    tokens: AnyArray,
    segments: AnyArray | None = None,
    source: Any = None,
) -> Batch:
    """Returns a batch whose targets are the next tokens of each document.

    The last token of a document has no target. Neither do tokens whose next one the model does not
    predict, because it belongs to the prefix of a prefix-LM.

    Args:
        model: an autoregressive model.
        tokens: int [batch, length].
        segments: int [batch, length]; 0 is padding, 1, 1, 2, 2, … are packed documents. None: each
            row is one document.
        source: for a model that reads one, rows of ids, one for each row of tokens.

    Raises:
        ValueError: an argument is not accepted, or the model is bidirectional.
    """
    if model.config.bidirectional:
        raise ValueError(
            f"model is a {type(model).__name__}, which predicts hidden tokens and not the next "
            "one; give a Batch with targets and weights (training.evaluate makes them)"
        )
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    check_rows("tokens", tokens)
    read = model.read_source(source) or Inputs(None)
    rows = jnp.ones(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments)
    documents, positions, _ = document_positions(rows, DocumentCursor.begin(len(rows)))
    length = rows.shape[1]
    # The index of the next real token; `length` after the last one.
    real = jnp.where(documents != 0, jnp.arange(length, dtype=jnp.int32), length)
    following = jax.lax.cummin(real, axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    index = jnp.minimum(following, length - 1)
    # The first token of a document has position 0, which no model predicts.
    predicted = jnp.take_along_axis(positions, index, axis=1) >= model.minimum_prefill
    counts = (documents != 0) & (following < length) & predicted
    return Batch(
        jnp.asarray(tokens),
        jnp.take_along_axis(jnp.asarray(tokens), index, axis=1),
        counts.astype(jnp.float32),
        None if segments is None else rows,
        read.tokens,
        read.segments,
    )


def repeated_batch(vocab_size: int, length: int, num_rows: int, seed: int = 0) -> Batch:
    """Returns random sequences that occur twice; only the second copy counts in the loss.

    The first token of the second copy is not counted, because nothing announces the repetition.

    Args:
        vocab_size: tokens are drawn uniformly from 0 … vocab_size − 1.
        length: tokens per row, at least 4. An odd length is reduced by one.
        num_rows: number of rows.
        seed: seed of the draw.
    """
    half = whole_number("length", length, 4) // 2
    random = np.random.default_rng(seed).integers(0, vocab_size, (num_rows, half))
    tokens = np.tile(random, 2).astype(np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, half:-1] = 1.0
    return Batch(*map(jnp.asarray, (tokens, np.roll(tokens, -1, axis=1), weights)))


def checked_batch(model: LanguageModel, batch: Batch) -> Batch:
    """Returns the batch as arrays after all checks, with weights.

    Raises:
        ValueError: an array is not accepted, there are no tokens or fewer than two rows, or a row
            has no target that counts.
    """
    inputs = checked_inputs(inputs_of(batch), model.config)
    targets = as_array("targets", batch.targets)
    check_rows("inputs", inputs.tokens)
    rows, length = inputs.tokens.shape
    weights = np.ones((rows, length), np.float32) if batch.weights is None else batch.weights
    check_targets((rows, length, model.config.vocab_size), targets, weights)
    if not isinstance(weights, jax.core.Tracer):
        empty = ~(np.asarray(weights) > 0).any(axis=1)
        if empty.any():
            raise ValueError(
                f"row {int(empty.argmax())} has no target that counts; leave it out, or make it "
                "at least two tokens long"
            )
    return Batch(
        inputs.tokens,
        jnp.where(weights != 0, jnp.asarray(targets), 0),
        jnp.asarray(weights, jnp.float32),
        inputs.segments,
        inputs.source,
        inputs.source_segments,
    )


def check_rows(name: str, tokens: AnyArray) -> None:
    """Raises ValueError unless tokens are ids in at least two rows of at least one token."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name} are {tokens.dtype}; heads are measured on ids of tokens")
    if len(tokens) < 2 or not tokens.shape[1]:
        raise ValueError(
            f"{name} are {tokens.shape}; there must be at least two rows, for a standard error, "
            "and at least one token a row"
        )


def inputs_of(batch: Batch) -> Inputs:
    """Returns the tokens, segments and source of a batch."""
    return Inputs(batch.inputs, batch.segments, None, batch.source, batch.source_segments)


def query_inputs(batch: Batch, attention: str) -> Inputs:
    """Returns the tokens and segments of the queries of an attention."""
    inputs = inputs_of(batch)
    if attention.startswith("encoder."):
        return inputs.of_source()
    return replace(inputs, source=None, source_segments=None)


def map_rows(function: Callable[[Batch], Any], batch: Batch, rows_at_once: int) -> Any:
    """Applies a function to `rows_at_once` rows at a time, so that memory is bounded.

    Args:
        function: (batch of at most `rows_at_once` rows) → tree of arrays [rows, …].
        batch: the rows.
        rows_at_once: number of rows in memory at once.

    Returns:
        The results of all rows, arrays [rows, …].
    """
    rows = len(batch.inputs)
    size = min(rows_at_once, rows)
    missing = -rows % size

    def in_chunks(x: Array) -> Array:
        x = jnp.concatenate([x, x[:missing]])  # the results of these copies are dropped
        return x.reshape(-1, size, *x.shape[1:])

    results = jax.lax.map(function, jax.tree.map(in_chunks, batch))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], results)
