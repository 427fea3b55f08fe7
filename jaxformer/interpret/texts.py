"""Checks the inputs of a model, and makes batches for measurements of attention heads."""

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
from jaxformer.models.check import AnyArray, Sources, as_array, check_tokens, checked_inputs
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of
from jaxformer.training.batch import Batch


def read_inputs(
    model: LanguageModel, variables: Variables, tokens: Any, source: Sources | None = None
) -> Inputs:
    """Checks token ids and sources, and returns the inputs of a forward pass.

    Args:
        model: any model.
        variables: the model's variables.
        tokens: token ids, int [batch, length].
        source: for a model with a source, lists of ids of any lengths, or int [batch, source].

    Raises:
        ValueError: An argument is invalid.
    """
    model.check(variables)
    read = model.read_source(source) or Inputs(None)
    tokens = as_array("tokens", tokens)
    if tokens.ndim == 2 and not tokens.shape[1]:
        raise ValueError(f"tokens are {tokens.shape}; each text needs at least one token")
    inputs = Inputs(tokens, source=read.tokens, source_segment_ids=read.segment_ids)
    return checked_inputs(inputs, model.config)


class Read(NamedTuple):
    """Inputs of a model, and the token and position of the logit to explain in each text.

    Attributes:
        inputs: the inputs of the forward pass.
        target: the token of the logit.
        position: the position of the logit, counted from the start.
    """

    inputs: Inputs
    target: Int[Array, " batch"]
    position: int | Int[Array, ""]


def read_logits(
    model: LanguageModel,
    variables: Variables,
    tokens: Any,
    target: Any,
    position: int,
    source: Sources | None,
) -> Read:
    """Checks the inputs of a forward pass, and the token and position of the logit to explain.

    Args:
        model: any model.
        variables: the model's variables.
        tokens: ids, int [batch, length].
        target: for each text, the id of the token whose logit is explained.
        position: the position that predicts the target; negative positions count from the end.
        source: the source sequences, for models with a source.

    Raises:
        ValueError: An argument is invalid.
    """
    inputs = read_inputs(model, variables, tokens, source)
    batch_size, length = inputs.tokens.shape[:2]
    target, vocab_size = jnp.asarray(as_array("target", target)), model.config.vocab_size
    if target.shape != (batch_size,):
        raise ValueError(
            f"target has shape {target.shape}; it must be ({batch_size},), one id per text"
        )
    if (target < 0).any() or (target >= vocab_size).any():
        raise ValueError(f"target is {target}; ids are 0 … {vocab_size - 1}")
    if whole_number("position", position, -length) >= length:
        raise ValueError(
            f"position is {position}; it must be in {-length} … {length - 1}, because the texts "
            f"have {length} tokens"
        )
    return Read(inputs, target, position % length)


def next_token_batch(
    model: LanguageModel,
    tokens: AnyArray,
    segment_ids: AnyArray | None = None,
    source: Sources | None = None,
) -> Batch:
    """Returns a batch whose targets are the next tokens of each document.

    The last token of a document has no target. In a prefix-LM, a token also has no target if
    the next token belongs to the prefix.

    Args:
        model: an autoregressive model.
        tokens: int [batch, length].
        segment_ids: int [batch, length]; 0 for padding, 1, 1, 2, 2, … for packed documents. If
            None, each sequence is one document.
        source: for a model with a source, one list of ids per sequence.

    Raises:
        ValueError: An argument is invalid or the model is bidirectional.
    """
    if model.config.bidirectional:
        raise ValueError(
            f"model is {kind_of(model)}, which predicts masked tokens; "
            "pass a Batch with targets and weights (training.evaluate makes such batches)"
        )
    tokens, segment_ids = as_array("tokens", tokens), as_array("segment_ids", segment_ids)
    check_tokens(tokens, model.config, segment_ids)
    check_sequences("tokens", tokens)
    read = model.read_source(source) or Inputs(None)
    document_ids = (
        jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    )
    documents, positions, _ = document_positions(
        document_ids, DocumentCursor.begin(len(document_ids))
    )
    length = document_ids.shape[1]
    # The index of the next token that is not padding, or `length` if only padding follows.
    real = jnp.where(documents != 0, jnp.arange(length, dtype=jnp.int32), length)
    following = jax.lax.cummin(real, axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    index = jnp.minimum(following, length - 1)
    # The first token of a document has position 0 and is never a target.
    predicted = jnp.take_along_axis(positions, index, axis=1) >= model.minimum_prefill
    counts = (documents != 0) & (following < length) & predicted
    return Batch(
        jnp.asarray(tokens),
        jnp.take_along_axis(jnp.asarray(tokens), index, axis=1),
        counts.astype(jnp.float32),
        None if segment_ids is None else document_ids,
        read.tokens,
        read.segment_ids,
    )


def repeated_batch(vocab_size: int, length: int, num_sequences: int, seed: int = 0) -> Batch:
    """Returns random sequences that repeat once; only the second copy counts in the loss.

    The first token of the second copy is excluded, because the model cannot predict where this copy
    begins.

    Args:
        vocab_size: tokens are drawn uniformly from 0 … vocab_size − 1.
        length: tokens per sequence, at least 4. An odd length is reduced by one.
        num_sequences: number of sequences.
        seed: random seed.
    """
    half = whole_number("length", length, 4) // 2
    random = np.random.default_rng(seed).integers(0, vocab_size, (num_sequences, half))
    tokens = np.tile(random, 2).astype(np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, half:-1] = 1.0
    return Batch(*map(jnp.asarray, (tokens, np.roll(tokens, -1, axis=1), weights)))


def checked_batch(model: LanguageModel, batch: Batch) -> Batch:
    """Checks a batch, and converts it to arrays with weights.

    Raises:
        ValueError: An array is invalid, the batch has fewer than two sequences or no tokens, or
            a sequence has only targets of weight 0.
    """
    inputs = checked_inputs(batch_inputs(batch), model.config)
    targets = as_array("targets", batch.targets)
    check_sequences("inputs", inputs.tokens)
    batch_size, length = inputs.tokens.shape
    weights = np.ones((batch_size, length), np.float32) if batch.weights is None else batch.weights
    check_targets((batch_size, length, model.config.vocab_size), targets, weights)
    if not isinstance(weights, jax.core.Tracer):
        empty = ~(np.asarray(weights) > 0).any(axis=1)
        if empty.any():
            raise ValueError(
                f"batch element {int(empty.argmax())} has only targets of weight 0; remove it, or "
                "make it at least two tokens long"
            )
    return Batch(
        inputs.tokens,
        jnp.where(weights != 0, jnp.asarray(targets), 0),
        jnp.asarray(weights, jnp.float32),
        inputs.segment_ids,
        inputs.source,
        inputs.source_segment_ids,
    )


def check_sequences(name: str, tokens: AnyArray) -> None:
    """Raises ValueError unless tokens are at least two sequences of at least one token id."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name} are {tokens.dtype}; they must be integer token ids")
    if len(tokens) < 2 or not tokens.shape[1]:
        raise ValueError(
            f"{name} are {tokens.shape}; pass at least two sequences (for a standard error) of "
            "at least one token"
        )


def batch_inputs(batch: Batch) -> Inputs:
    """Returns the tokens, segment_ids and source of a batch."""
    return Inputs(batch.inputs, batch.segment_ids, None, batch.source, batch.source_segment_ids)


def query_inputs(batch: Batch, attention: str) -> Inputs:
    """Returns the tokens and segment ids from which `attention` computes its queries."""
    inputs = batch_inputs(batch)
    if attention.startswith("encoder."):
        return inputs.source_inputs()
    return replace(inputs, source=None, source_segment_ids=None)


def map_sequences(
    function: Callable[[Batch], Any], batch: Batch, batch_size_within_memory: int
) -> Any:
    """Applies a function to `batch_size_within_memory` sequences at a time, to bound memory.

    Args:
        function: maps a batch of at most `batch_size_within_memory` sequences to a tree of arrays
            [batch, …].
        batch: all sequences.
        batch_size_within_memory: number of sequences that one call processes.

    Returns:
        The results for all sequences, arrays [batch, …].
    """
    batch_size = len(batch.inputs)
    size = min(batch_size_within_memory, batch_size)
    missing = -batch_size % size

    def in_chunks(x: Array) -> Array:
        # Copies of the first sequences fill the last chunk. The results of these copies are
        # dropped.
        x = jnp.concatenate([x, x[:missing]])
        return x.reshape(-1, size, *x.shape[1:])

    results = jax.lax.map(function, jax.tree.map(in_chunks, batch))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:batch_size], results)
