"""Scores of attention heads: the share of attention weight that goes to certain tokens.

A score measures where a head attends. It does not prove a purpose.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.models.config.check import whole_number


class ScoreSettings(NamedTuple):
    """Settings of the scores.

    Attributes:
        delimiters: ids of the tokens that count as delimiters, such as a full stop or [SEP]. Empty:
            the delimiter score is NaN.
        window: largest distance, in tokens, that counts as local.
        bidirectional: whether queries see later tokens, as in an encoder.
    """

    delimiters: tuple[int, ...] = ()
    window: int = 4
    bidirectional: bool = False


class HeadScores(NamedTuple):
    """Scores of the heads of self-attention, each float [layers, heads].

    Each score is a share of attention weight in [0, 1]. It is the mean over those queries of the
    batch for which it is defined. It is NaN if it is defined for no query. Positions count from 0
    within each document. Padding and other documents never count, neither as queries nor as keys.

    Attributes:
        previous_token: weight on the token one position before the query. Defined for every query
            except the first of a document. Reference: Clark et al. 2019, §3.1.
        duplicate_token: weight on all earlier tokens with the id of the query. Defined for queries
            with such a token. Reference: Wang et al. 2022 (duplicate token heads), §3.
        induction: weight on all tokens before the query that directly follow an earlier token with
            the id of the query. Defined for queries with such a token. Reference: Olsson et al.
            2022 (prefix matching).
        first_token: weight on the first token of the document. Defined for every query except the
            first of a document. Reference: Xiao et al. 2023 (attention sinks).
        local: weight on tokens at a distance of at most `window`, the query included. Defined for
            queries at positions above `window`. Reference: Sukhbaatar et al. 2019, §3.
        delimiter: weight on all delimiters up to the query, or in the whole document if the model
            is bidirectional. Defined for queries with such a token. Reference: Clark et al. 2019,
            §3.2.
    """

    previous_token: Array
    duplicate_token: Array
    induction: Array
    first_token: Array
    local: Array
    delimiter: Array


class CrossScores(NamedTuple):
    """Scores of the heads of cross-attention, each float [layers, heads].

    Attributes:
        monotone: how far attention moves through the source in the order of the target, in [−1, 1].
            Take two queries of one sequence and draw a source position for each from its weights.
            The score is the probability that the later query gets the later position, minus the
            probability that it gets the earlier one, averaged over all pairs of queries (Kendall's
            τ_a of the alignment). It is 1 for a strictly monotone alignment, −1 for a reversed one,
            and 0 if all queries have the same weights. Reference: Kendall 1938; Raffel et al. 2017
            (monotonic attention).
        first_token: weight on the first token of the source. Reference: Xiao et al. 2023.
        last_token: weight on the last token of the source, often its end token. Reference: Clark et
            al. 2019, §3.2.
    """

    monotone: Array
    first_token: Array
    last_token: Array


class ScoreSums(NamedTuple):
    """Sums from which scores are computed; sums of several batches can be added.

    Attributes:
        total: summed shares.
        count: number of queries (or pairs of queries) in the sum.
    """

    total: Float[Array, "scores layers heads"]
    count: Float[Array, " scores"]

    def mean(self) -> Float[Array, "scores layers heads"]:
        """Returns total / count, or NaN where nothing was counted."""
        count = self.count[:, None, None]
        return jnp.where(count > 0, self.total / jnp.maximum(count, 1), jnp.nan)


def check_scored(weights: Any, settings: ScoreSettings = ScoreSettings(), **_: Any) -> None:  # noqa: B008 (immutable)
    """Raises ValueError unless there is a token to score and the settings are accepted."""
    if not np.size(weights):
        raise ValueError(f"weights are {np.shape(weights)}; there must be at least one token")
    check_settings(settings)


@checks_arguments(check_scored)
@partial(jax.jit, static_argnames="settings")
def head_scores(
    weights: Float[Array, "layers batch heads length length"],
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None = None,
    settings: ScoreSettings = ScoreSettings(),  # noqa: B008 (immutable)
) -> HeadScores:
    """Computes the scores of every head of self-attention.

    Args:
        weights: captured at "attention.weights"; queries on the last axis but one.
        tokens: ids of the tokens.
        segments: 1, 1, 2, 2, … for packed documents, 0 for padding; None: one document.
        settings: delimiters, window and direction.

    Raises:
        ValueError: a shape does not fit, there are no tokens, or a setting is not accepted.
    """
    return HeadScores(*score_sums(weights, tokens, segments, settings).mean())


@checks_arguments(check_scored)
@jax.jit
def cross_scores(
    weights: Float[Array, "layers batch heads length source"],
    segments: Int[Array, "batch length"] | None = None,
    source_segments: Int[Array, "batch source"] | None = None,
) -> CrossScores:
    """Computes the scores of every head of cross-attention.

    Args:
        weights: captured at "cross_attention.weights"; queries on the last axis but one.
        segments: of the queries: 1, 1, 2, 2, … for packed documents, 0 for padding; None: one
            document. Only queries of one document form pairs.
        source_segments: of the source; 0 for padding; None: no padding.

    Raises:
        ValueError: a shape does not fit, or there are no tokens.
    """
    return CrossScores(*cross_score_sums(weights, segments, source_segments).mean())


def score_sums(
    weights: Float[Array, "layers batch heads length length"],
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None,
    settings: ScoreSettings,
) -> ScoreSums:
    """Computes the sums of `HeadScores`, in the order of its fields."""
    documents, positions = _documents(tokens.shape, segments)
    keys, defined = _targets(tokens, documents, positions, settings)
    same = _same_document(documents)[None, :, None]
    # Weights at padding may be NaN, which a product with 0 would keep.
    weights = jnp.where(same, weights.astype(jnp.float32), 0.0)
    counted = (keys & defined[..., None]).astype(jnp.float32)
    total = jnp.einsum("sbqk,lbhqk->slh", counted, weights)
    return ScoreSums(total, defined.sum(axis=(1, 2)).astype(jnp.float32))


def cross_score_sums(
    weights: Float[Array, "layers batch heads length source"],
    segments: Int[Array, "batch length"] | None,
    source_segments: Int[Array, "batch source"] | None,
) -> ScoreSums:
    """Computes the sums of `CrossScores`, in the order of its fields."""
    _, batch, _, length, source = weights.shape
    documents, positions = _documents((batch, length), segments)
    is_source = jnp.ones((batch, source), bool) if source_segments is None else source_segments != 0
    real = (documents != 0)[:, :, None] & is_source[:, None, :]
    weights = jnp.where(real[None, :, None], weights.astype(jnp.float32), 0.0)
    pairs = _same_document(documents) & (positions[:, :, None] < positions[:, None, :])
    pairs = pairs.astype(jnp.float32)
    before = jnp.cumsum(weights, axis=-1) - weights
    after = weights.sum(axis=-1, keepdims=True) - before - weights
    of_later = jnp.einsum("bqr,lbhrk->lbhqk", pairs, after - before)
    moved = jnp.einsum("lbhqk,lbhqk->lh", weights, of_later)
    index = jnp.arange(source, dtype=jnp.int32)
    first = jnp.where(is_source, index, source).min(axis=1)[:, None] == index
    last = jnp.where(is_source, index, -1).max(axis=1)[:, None] == index
    ends = jnp.stack([first, last]).astype(jnp.float32)
    shares = jnp.einsum("sbk,lbhqk->slh", ends, weights)
    queries = (documents != 0).sum().astype(jnp.float32)
    return ScoreSums(
        jnp.concatenate([moved[None], shares]), jnp.stack([pairs.sum(), queries, queries])
    )


def check_settings(settings: ScoreSettings) -> None:
    """Raises ValueError unless the window is a positive whole number and delimiters are ids."""
    whole_number("window", settings.window, 1)
    for token in settings.delimiters:
        whole_number("delimiters", token, 0)


def _documents(
    shape: tuple[int, ...], segments: Int[Array, "batch length"] | None
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Returns the document of each token, 0 for padding, and its position in the document."""
    segments = jnp.ones(shape, jnp.int32) if segments is None else jnp.asarray(segments)
    return document_positions(segments, DocumentCursor.begin(shape[0]))[:2]


def _same_document(documents: Int[Array, "batch length"]) -> Bool[Array, "batch length length"]:
    """Returns whether query and key are real tokens of one document."""
    same = documents[:, :, None] == documents[:, None, :]
    return same & (documents != 0)[:, :, None]


def _targets(
    tokens: Int[Array, "batch length"],
    documents: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    settings: ScoreSettings,
) -> tuple[Bool[Array, "scores batch length length"], Bool[Array, "scores batch length"]]:
    """Returns the keys that count for each score, and the queries for which it is defined."""
    same, real = _same_document(documents), documents != 0
    distance = positions[:, :, None] - positions[:, None, :]  # of a key before the query
    equal = same & (tokens[:, :, None] == tokens[:, None, :])
    # The id of the token one position before each key; only keys at positions above 0 have one.
    before = jnp.where(same & (distance == -1), tokens[:, :, None], 0).sum(axis=1)
    follows = (tokens[:, :, None] == before[:, None, :]) & (positions > 0)[:, None, :]
    earlier = same & (distance > 0)
    delimiters = jnp.isin(tokens, jnp.asarray(settings.delimiters, jnp.int32))[:, None, :] & same
    if not settings.bidirectional:
        delimiters &= distance >= 0
    keys = HeadScores(
        previous_token=same & (distance == 1),
        duplicate_token=equal & earlier,
        induction=follows & earlier,
        first_token=same & (positions == 0)[:, None, :],
        local=same & (abs(distance) <= settings.window),
        delimiter=delimiters,
    )
    later = real & (positions > 0)
    defined = HeadScores(
        previous_token=later,
        duplicate_token=keys.duplicate_token.any(axis=-1),
        induction=keys.induction.any(axis=-1),
        first_token=later,
        local=real & (positions > settings.window),
        delimiter=keys.delimiter.any(axis=-1),
    )
    return jnp.stack(keys), jnp.stack(defined)
