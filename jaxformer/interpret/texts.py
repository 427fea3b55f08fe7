"""The texts on which heads are measured, and checks that a model has heads to measure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxformer.functional.arguments import whole_number
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.cross_entropy import check_targets
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.interpret.layers import layers_with, transformer_config
from jaxformer.models.check import AnyArray, as_array, check_tokens, checked_inputs
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import Batch

ATTENTIONS = ("attention", "cross_attention", "encoder.attention")


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
    read = model.read_source(source)
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
    batch = Batch(
        jnp.asarray(tokens),
        jnp.take_along_axis(jnp.asarray(tokens), index, axis=1),
        counts.astype(jnp.float32),
        None if segments is None else rows,
    )
    return (
        batch if read is None else batch._replace(source=read.tokens, source_segments=read.segments)
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
    return Batch(
        jnp.asarray(tokens), jnp.roll(jnp.asarray(tokens), -1, axis=1), jnp.asarray(weights)
    )


def check_heads(model: LanguageModel, attention: str) -> None:
    """Raises ValueError unless the model has heads of this attention in every layer.

    Args:
        model: any model.
        attention: one of `ATTENTIONS`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention is {attention!r}; it must be one of {', '.join(ATTENTIONS)}")
    has_heads = isinstance(model, LanguageModel) and model.config.heads
    points = model.layer_points if has_heads else ()
    if f"{attention}.weights" in points:
        there, num_layers = (
            layers_with(model, f"{attention}.weights"),
            heads_shape(model, attention)[0],
        )
        if lacking := sorted(set(range(num_layers)) - set(there)):
            raise ValueError(
                f"layer {lacking[0]} of the model has no {attention}; heads are measured in models "
                "in which every layer has it"
            )
        return
    there = [name for name in ATTENTIONS if f"{name}.weights" in points]
    accepted = (
        f"its attention is {' or '.join(there)}"
        if there
        else "accepted are Transformers: Decoder, Encoder and EncoderDecoder"
    )
    raise ValueError(
        f"model is a {type(model).__name__}, which has no heads of {attention!r}; {accepted}"
    )


def heads_shape(model: LanguageModel, attention: str) -> tuple[int, int]:
    """Returns (number of layers, number of heads)."""
    in_encoder = attention.startswith("encoder.")
    config = transformer_config(model).stacks["encoder/" if in_encoder else ""]
    return config.num_layers, config.heads[0]


def checked_batch(model: LanguageModel, batch: Batch) -> Batch:
    """Returns the batch as arrays after all checks, with weights.

    Raises:
        ValueError: an array is not accepted, there are no tokens or fewer than two rows, or a row
            has no target that counts.
    """
    given = Inputs(batch.inputs, batch.segments, None, batch.source, batch.source_segments)
    inputs = checked_inputs(given, model.config)
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
