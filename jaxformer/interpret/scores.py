"""Scores of attention heads: the fraction of attention weight on certain tokens.

A score describes which tokens a head attends to. A score does not prove what the head computes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.interpret.summary import summary
from jaxformer.models.config.check import whole_number


class ScoreSettings(NamedTuple):
    """Settings of the head scores.

    Attributes:
        delimiters: ids of the tokens that count as delimiters, such as a full stop or [SEP].
            Without delimiters, the delimiter score is NaN.
        window: largest distance, in tokens, that counts as local.
        bidirectional: whether queries attend to later tokens, as in an encoder.
    """

    delimiters: tuple[int, ...] = ()
    window: int = 4
    bidirectional: bool = False


class HeadScores(NamedTuple):
    """Scores of the heads of self-attention, each float [layers, heads].

    Each score is a fraction of attention weight in [0, 1], averaged over the queries of the batch
    for which the score is defined. A score is NaN if it is not defined for any query. Positions
    count from 0 within each document. Padding and keys of other documents are excluded.

    Attributes:
        previous_token: weight on the token one position before the query. The score is defined for
            every query except the first of a document. Reference: Clark et al. 2019, §3.1.
        duplicate_token: weight on all earlier tokens with the id of the query. The score is defined
            for queries whose id occurs earlier in the document. Reference: Wang et al. 2022
            (duplicate token heads), §3.
        induction: weight on all earlier tokens whose preceding token has the id of the query. The
            score is defined for queries that have at least one key of this kind. Reference: Olsson
            et al. 2022 (prefix matching).
        first_token: weight on the first token of the document. The score is defined for every query
            except the first of a document. Reference: Xiao et al. 2023 (attention sinks).
        local: weight on tokens at a distance of at most `window`, the query included. The score is
            defined for queries at positions above `window`. Reference: Sukhbaatar et al. 2019, §3.
        delimiter: weight on all delimiters up to the query, or in the whole document if the model
            is bidirectional. The score is defined for queries that have at least one key of this
            kind. Reference: Clark et al. 2019, §3.2.
    """

    previous_token: Array
    duplicate_token: Array
    induction: Array
    first_token: Array
    local: Array
    delimiter: Array

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class CrossScores(NamedTuple):
    """Scores of the heads of cross-attention, each float [layers, heads].

    Attributes:
        monotone: monotonicity of the alignment between target and source, in [−1, 1] (Kendall's
            τ_a). For each pair of queries of a document, each query samples a source position from
            its attention weights. The value of the pair is the probability that the later query
            samples the larger position, minus the probability that the earlier query does. The
            score is the mean over all pairs. The score is 1 for a strictly monotone alignment, −1
            for a reversed alignment, and 0 if all queries have equal weights. Reference: Kendall
            1938; Raffel et al. 2017 (monotonic attention).
        first_token: weight on the first token of the source. Reference: Xiao et al. 2023.
        last_token: weight on the last token of the source, often its end token. Reference: Clark et
            al. 2019, §3.2.
    """

    monotone: Array
    first_token: Array
    last_token: Array

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class ScoreSums(NamedTuple):
    """Sums from which the scores of the heads are computed.

    The sums of several batches can be added.

    Attributes:
        total: sum of each score over queries (or pairs of queries).
        count: number of queries (or pairs of queries) in each sum.
    """

    total: Float[Array, "scores layers heads"]
    count: Float[Array, " scores"]

    def mean(self) -> Float[Array, "scores layers heads"]:
        """Returns total / count, or NaN where the count is 0."""
        count = self.count[:, None, None]
        return jnp.where(count > 0, self.total / jnp.maximum(count, 1), jnp.nan)


def check_scored(weights: Any, settings: ScoreSettings = ScoreSettings(), **_: Any) -> None:  # noqa: B008 (immutable)
    """Raises ValueError if the weights are empty or a setting is invalid."""
    if not np.size(weights):
        raise ValueError(
            f"weights has shape {np.shape(weights)}; every axis must have a size of at least 1"
        )
    check_settings(settings)


@checks_arguments(check_scored)
@partial(jax.jit, static_argnames="settings")
def head_scores(
    weights: Float[Array, "layers batch heads length length"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    settings: ScoreSettings = ScoreSettings(),  # noqa: B008 (immutable)
) -> HeadScores:
    """Computes the scores of every head of self-attention.

    Args:
        weights: the attention weights captured at "attention.weights".
        tokens: the token ids.
        segment_ids: the number of each token's document, such as 1, 1, 2, 2, and 0 for padding.
            If None, each sequence is one document.
        settings: delimiters, window and direction of attention.

    Raises:
        ValueError: The shapes of the arguments do not fit, there are no tokens, or a setting is
            invalid.
    """
    return HeadScores(*score_sums(weights, tokens, segment_ids, settings).mean())


@checks_arguments(check_scored)
@jax.jit
def cross_scores(
    weights: Float[Array, "layers batch heads length source"],
    segment_ids: Int[Array, "batch length"] | None = None,
    source_segment_ids: Int[Array, "batch source"] | None = None,
) -> CrossScores:
    """Computes the scores of every head of cross-attention.

    Args:
        weights: the attention weights captured at "cross_attention.weights".
        segment_ids: segment ids of the queries, such as 1, 1, 2, 2 for two packed documents, and 0
            for padding. If None, each sequence is one document. Only queries of the same document
            form pairs.
        source_segment_ids: segment ids of the source, 0 for padding; no padding if None.

    Raises:
        ValueError: The shapes of the arguments do not fit, or there are no tokens.
    """
    return CrossScores(*cross_score_sums(weights, segment_ids, source_segment_ids).mean())


def score_sums(
    weights: Float[Array, "layers batch heads length length"],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    settings: ScoreSettings,
) -> ScoreSums:
    """Computes one sum for each field of `HeadScores`, in the order of the fields."""
    documents, positions = _documents(tokens.shape, segment_ids)
    keys, defined = _targets(tokens, documents, positions, settings)
    same = _same_document(documents)[None, :, None]
    # Attention weights at padding may be NaN, and a product with 0 would not remove them.
    weights = jnp.where(same, weights.astype(jnp.float32), 0.0)
    counted = (keys & defined[..., None]).astype(jnp.float32)
    total = jnp.einsum("sbqk,lbhqk->slh", counted, weights)
    return ScoreSums(total, defined.sum(axis=(1, 2)).astype(jnp.float32))


def cross_score_sums(
    weights: Float[Array, "layers batch heads length source"],
    segment_ids: Int[Array, "batch length"] | None,
    source_segment_ids: Int[Array, "batch source"] | None,
) -> ScoreSums:
    """Computes one sum for each field of `CrossScores`, in the order of the fields."""
    _, batch, _, length, source = weights.shape
    documents, positions = _documents((batch, length), segment_ids)
    is_source = (
        jnp.ones((batch, source), bool) if source_segment_ids is None else source_segment_ids != 0
    )
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
    """Raises ValueError unless the window is a positive integer and delimiters are token ids."""
    whole_number("window", settings.window, 1)
    for token in settings.delimiters:
        whole_number("delimiters", token, 0)


def _documents(
    shape: tuple[int, ...], segment_ids: Int[Array, "batch length"] | None
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Returns each token's document number (0 for padding) and position in the document."""
    segment_ids = jnp.ones(shape, jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    return document_positions(segment_ids, DocumentCursor.begin(shape[0]))[:2]


def _same_document(documents: Int[Array, "batch length"]) -> Bool[Array, "batch length length"]:
    """Returns whether query and key are tokens of the same document, and not padding."""
    same = documents[:, :, None] == documents[:, None, :]
    return same & (documents != 0)[:, :, None]


def _targets(
    tokens: Int[Array, "batch length"],
    documents: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    settings: ScoreSettings,
) -> tuple[Bool[Array, "scores batch length length"], Bool[Array, "scores batch length"]]:
    """Returns which keys each score sums over, and for which queries the score is defined.

    Returns:
        (keys, defined): `keys` is True for the pairs (query, key) whose attention weights are
        summed in the score. `defined` is True for the queries for which a score is defined.
    """
    same, real = _same_document(documents), documents != 0
    # The distance is positive for keys before the query.
    distance = positions[:, :, None] - positions[:, None, :]
    equal = same & (tokens[:, :, None] == tokens[:, None, :])
    # The id of the token before each key, valid for keys at positions above 0.
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
