"""Beam search: finds the most probable continuations by one compiled loop.

Each step continues every live hypothesis by every token and selects the `beam_width` most probable
results. A hypothesis that ends with a stop token is finished, and the next most probable live one
takes its place. A row is done when it has `beam_width` finished hypotheses and no live one is
likely to become better (see `beam_steps.Ending`). A beam of width 1 is greedy decoding, and a beam
of the width of all texts is an exhaustive search.

The score of a hypothesis is log P / length^length_penalty, where the length includes the stop
token. A penalty of 0 ranks by probability, which favours short texts, and 1 by the mean over the
tokens (Wu et al. 2016, §7, divide by (5 + length)/6 instead of the length).
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer.decoding.autoregressive import (
    check_finite_logits,
    check_not_traced,
    start_captured,
)
from jaxformer.decoding.batches import Batch, Texts, batches_of, in_order, rows_at_once
from jaxformer.decoding.beam_steps import Ending, Limits, _begin, _best, _go_on, _with_room
from jaxformer.decoding.cache_slots import live_slots, slots
from jaxformer.decoding.constraints import constraints_of_call, rules_of
from jaxformer.decoding.generate import Prompts, check_prompts
from jaxformer.decoding.prepared import prepare, weights_of
from jaxformer.decoding.steps import prefill
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import NO_HOOKS
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.generation import Constraints
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import to_host
from jaxformer.models.rows import padded

BEAM_WIDTH = 4  # beam width where neither the call nor the checkpoint sets one


class Hypotheses(NamedTuple):
    """Result of `beam_search`, the best hypothesis of each row first.

    Attributes:
        tokens: int [batch, num_hypotheses, max_new_tokens], 0 after the end.
        lengths: int [batch, num_hypotheses], the stop token included; 0 if there is no hypothesis.
        scores: float32 [batch, num_hypotheses], by which the hypotheses are ranked.
        log_probs: float32 [batch, num_hypotheses], log P of the whole continuation.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray


@in_auto_axes
def beam_search(
    model: LanguageModel,
    variables: Variables,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    beam_width: int | None = None,
    num_hypotheses: int = 1,
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] | None = None,
    stop_tokens: Iterable[int] = (),
    source: Any = None,
    constraints: Constraints | None = None,
    batch_size: int | None = None,
) -> Hypotheses:
    """Returns the `num_hypotheses` best continuations of each prompt that a beam search finds.

    A hypothesis without a stop token after `max_new_tokens` tokens also counts, unless its row is
    done before. Memory follows the length that hypotheses reach, not `max_new_tokens`.

    Args:
        model: an autoregressive model.
        variables: its variables, or the result of `prepare`.
        prompts: see `generate`.
        max_new_tokens: see `generate`.
        beam_width: number of live hypotheses of each row. None: that of `model.generation`, or 4,
            as in `translate` and on the command line.
        num_hypotheses: number of hypotheses to return, at most `beam_width`.
        length_penalty: the exponent p of the score log P / length^p. None: that of
            `model.generation`, or 1.0.
        early_stopping: when the search of a row is over; see `beam_steps.Ending`. None: that of
            `model.generation`, or False. With a beam width of 1 it is always True.
        stop_tokens: see `generate`.
        source: see `generate`.
        constraints: see `generate`. They apply to log P, and thereby to scores.
        batch_size: see `generate`. The caches are those of all hypotheses.

    Raises:
        ValueError: an argument is not accepted.
        FloatingPointError: logits of a row are not finite.
    """
    require_autoregressive(model)
    check_not_traced("beam_search", variables, prompts, source)
    constraints, defaults = constraints_of_call(model, constraints), model.generation
    beam_width = beam_width_of_call(model, beam_width)
    exponent: float = _first(length_penalty, defaults.length_penalty, 1.0)
    early_stopping = _first(early_stopping, defaults.early_stopping, False)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping is {early_stopping!r}; it must be True, False or 'never'")
    early_stopping = beam_width == 1 or early_stopping  # one hypothesis follows the greedy text
    if whole_number("num_hypotheses", num_hypotheses, 1) > beam_width:
        raise ValueError(
            f"num_hypotheses is {num_hypotheses}; it must be in 1 … beam_width ({beam_width})"
        )
    if not np.isfinite(exponent):
        raise ValueError(f"length_penalty is {exponent}; it must be finite")
    texts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    weights, given = weights_of(prepare(model, variables)), Texts(texts, source)
    ending = Ending(np.float32(exponent), np.int32(max_new_tokens), early_stopping)
    most = rows_at_once(model, weights, given, max_new_tokens, batch_size, beam_width)
    batches, parts = batches_of(given, most), []
    for batch in batches:
        rules = rules_of(
            constraints, batch.texts.prompts, batch.width, max_new_tokens, stops, batch.texts.source
        )
        found, broken = _search(
            model, weights, batch, Limits(stops, ending, rules), beam_width, max_new_tokens
        )
        check_finite_logits(batch.of_call(broken, len(texts)), variables)
        parts.append(Hypotheses(*(x[: batch.batch_size, :num_hypotheses] for x in found)))
    return in_order(parts, batches)


def _search(
    model: LanguageModel,
    weights: Weights,
    batch: Batch,
    limits: Limits,
    beam_width: int,
    max_new_tokens: int,
) -> tuple[Hypotheses, np.ndarray]:
    """Searches the continuations of one batch.

    Returns:
        (the hypotheses, bool [rows]: whether logits of a row are not finite).
    """
    (texts, source), width, rows = batch.texts, batch.width, len(batch.rows)
    live = slots(width + 1)
    size = CacheSize(rows, live, most=slots(width + max_new_tokens))
    cache, _ = start_captured(model, {"prepared": weights}, source, size, NO_HOOKS)
    passed = prefill(model, weights, Inputs(*padded(texts, width, left=True)), cache)
    search = _begin(passed, beam_width, live - width, np.int32(batch.batch_size))
    until, over = 0, False
    while until < max_new_tokens and not over:  # one call fills the slots, the next has more
        live = slots(width + until + 1)
        until = min(max_new_tokens, live - width)
        search = _with_room(search, live, live - width)
        slots_seen = live_slots(search.cache, live)
        search, over = _go_on(model, weights, search, limits, until, slots_seen)
    exponent = limits.ending.length_penalty
    beam = _best(search, exponent)
    scores = to_host(beam.scores(exponent))
    tokens, lengths, log_probs = map(to_host, (beam.tokens, beam.lengths(), beam.log_probs))
    lengths = np.where(np.isfinite(log_probs), lengths, 0)
    first = _first_tokens(tokens, lengths, max_new_tokens)
    return Hypotheses(first, lengths, scores, log_probs), to_host(search.broken)


def beam_width_of_call(model: LanguageModel, given: int | None) -> int:
    """Returns the beam width of a call, or else that of the model's checkpoint, or else BEAM_WIDTH.

    Raises:
        ValueError: `given` is not a whole number of at least 1.
    """
    return whole_number("beam_width", _first(given, model.generation.num_beams, BEAM_WIDTH), 1)


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


def _first_tokens(
    tokens: Int[np.ndarray, "batch width room"],
    lengths: Int[np.ndarray, "batch width"],
    max_new_tokens: int,
) -> np.ndarray:
    """Returns `max_new_tokens` tokens of each hypothesis, 0 after its end."""
    tokens = tokens[..., :max_new_tokens]
    tokens = np.where(np.arange(tokens.shape[-1]) < lengths[..., None], tokens, 0)
    return np.pad(tokens, [(0, 0), (0, 0), (0, max_new_tokens - tokens.shape[-1])])
