"""Beam search: finds the most probable continuations by one compiled loop.

Each step continues every live hypothesis by every token and selects the `beam_width` most probable
results. A hypothesis that ends with a stop token is finished, and the next most probable live one
takes its place. A row is done when it has `beam_width` finished hypotheses and no live one is
likely to become better (see `Ending`). A beam of width 1 is greedy decoding, and a beam
of the width of all texts is an exhaustive search.

The score of a hypothesis is log P / length^length_penalty, where the length includes the stop
token. A penalty of 0 ranks by probability, which favours short texts, and 1 by the mean over the
tokens (Wu et al. 2016, §7, divide by (5 + length)/6 instead of the length).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding.autoregressive import (
    check_finite_logits,
    check_not_traced,
    prepare,
    start_cache,
    weights_of,
)
from jaxformer.decoding.batches import Batch, batches_of, in_order, rows_at_once
from jaxformer.decoding.constraints import NO_TOKEN, Rules, constraints_of_call, rules_of
from jaxformer.decoding.generate import Prompts, check_prompts
from jaxformer.decoding.loop_cache import LoopCache, live_slots, slots, with_slots
from jaxformer.decoding.steps import Prefill, prefill
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

Exponent = float | np.floating | Float[Array, ""]
OfBeam = Int[Array, "batch width"]

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


class Beam(NamedTuple):
    """Hypotheses of each row.

    Attributes:
        tokens: int [batch, width, max_new_tokens], NO_TOKEN after the end.
        log_probs: float32 [batch, width], log P; −∞ if there is no hypothesis.
    """

    tokens: jax.Array
    log_probs: jax.Array

    def take(self, index: Int[Array, "batch some"]) -> "Beam":
        """Returns the hypotheses at `index`, int [batch, some]."""
        tokens = jnp.take_along_axis(self.tokens, index[:, :, None], axis=1)
        return Beam(tokens, jnp.take_along_axis(self.log_probs, index, axis=1))

    def concatenated(self, other: "Beam") -> "Beam":
        """Returns the hypotheses of both beams."""
        return Beam(*(jnp.concatenate(pair, axis=1) for pair in zip(self, other, strict=True)))

    def lengths(self) -> Int[Array, "batch width"]:
        """Returns the number of tokens of each hypothesis."""
        return (self.tokens >= 0).sum(axis=-1)

    def scores(self, length_penalty: Exponent) -> Float[Array, "batch width"]:
        """Returns log P / length^length_penalty of each hypothesis."""
        return self.log_probs / jnp.maximum(self.lengths(), 1) ** length_penalty

    def best(self, number: int, length_penalty: Exponent) -> "Beam":
        """Returns the `number` hypotheses with the highest scores, the best first."""
        return self.take(jax.lax.top_k(self.scores(length_penalty), number)[1])


class Search(NamedTuple):
    """State of a search between steps."""

    cache: Any
    logits: jax.Array  # [batch · width, vocab], of the last token read
    live: Beam
    finished: Beam
    step: jax.Array  # int [], tokens generated
    broken: jax.Array  # bool [batch], whether a hypothesis had logits that are NaN
    done: jax.Array  # bool [batch], whether the search of the row is over


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ending:
    """What ends hypotheses and searches, and constrains the tokens of hypotheses.

    The search of a row is over when the row has `beam_width` finished hypotheses and, unless
    `early_stopping` is True, no live hypothesis can still score better than the worst of them. The
    score that a live hypothesis can reach is, with False, its score at its present length; with
    "never", an upper bound for all lengths.

    Attributes:
        stops: int [stops], ids that end a hypothesis.
        length_penalty: the exponent of the length in scores.
        max_new_tokens: the most tokens of a hypothesis.
        early_stopping: True, False or "never".
        rules: constraints on the tokens; None: no constraints.
    """

    stops: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    length_penalty: Any
    max_new_tokens: Any
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})
    rules: Rules | None = None

    def is_over(self, live: Beam, finished: Beam, length: Int[Array, ""]) -> Bool[Array, " batch"]:
        """Returns bool [batch]; `length` is the number of tokens of the live hypotheses."""
        is_full = (finished.log_probs > -jnp.inf).all(axis=1)
        if self.early_stopping is True:
            return is_full
        if self.early_stopping == "never":
            length = jnp.where(self.length_penalty > 0, self.max_new_tokens, length)
        best = live.log_probs.max(axis=1) / length**self.length_penalty
        return is_full & (best <= finished.scores(self.length_penalty).min(axis=1))


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
        early_stopping: when the search of a row is over; see `Ending`. None: that of
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
    weights = weights_of(prepare(model, variables))
    most = rows_at_once(model, weights, texts, source, max_new_tokens, batch_size, beam_width)
    ending = Ending(stops, np.float32(exponent), np.int32(max_new_tokens), early_stopping)
    batches, parts = batches_of(texts, source, most), []
    for batch in batches:
        given, width, sources = batch.prompts, batch.width, batch.source
        rules = rules_of(constraints, given, width, max_new_tokens, stops, sources)
        limits = replace(ending, rules=rules)
        found, broken = _search(model, weights, batch, limits, beam_width, max_new_tokens)
        check_finite_logits(broken, variables, batch.rows)
        parts.append(Hypotheses(*(x[: batch.batch_size, :num_hypotheses] for x in found)))
    return in_order(parts, batches)


def _search(
    model: LanguageModel,
    weights: Weights,
    batch: Batch,
    ending: Ending,
    beam_width: int,
    max_new_tokens: int,
) -> tuple[Hypotheses, np.ndarray]:
    """Searches the continuations of one batch.

    Returns:
        (the hypotheses, bool [rows]: whether logits of a row are not finite).
    """
    width, rows = batch.width, len(batch.rows)
    live = slots(width + 1)
    size = CacheSize(rows, live, most=slots(width + max_new_tokens))
    cache, _ = start_cache(model, weights, model.read_source(batch.source), size, NO_HOOKS)
    passed = prefill(model, weights, Inputs(*padded(batch.prompts, width, left=True)), cache)
    search = _begin(passed, beam_width, live - width, np.int32(batch.batch_size))
    until, over = 0, False
    while until < max_new_tokens and not over:  # one call fills the slots, the next has more
        live = slots(width + until + 1)
        until = min(max_new_tokens, live - width)
        search = _with_room(search, live, live - width)
        slots_seen = live_slots(search.cache, live)
        search, over = _go_on(model, weights, search, ending, until, slots_seen)
    exponent = ending.length_penalty
    beam = _best(search, exponent)
    scores = to_host(beam.scores(exponent))
    tokens, lengths, log_probs = map(to_host, (beam.tokens, beam.lengths(), beam.log_probs))
    lengths = np.where(np.isfinite(log_probs), lengths, 0)
    tokens = tokens[..., :max_new_tokens]
    tokens = np.where(np.arange(tokens.shape[-1]) < lengths[..., None], tokens, 0)
    tokens = np.pad(tokens, [(0, 0), (0, 0), (0, max_new_tokens - tokens.shape[-1])])
    return Hypotheses(tokens, lengths, scores, log_probs), to_host(search.broken)


def beam_width_of_call(model: LanguageModel, given: int | None) -> int:
    """Returns the beam width of a call, or else that of the model's checkpoint, or else BEAM_WIDTH.

    Raises:
        ValueError: `given` is not a whole number of at least 1.
    """
    return whole_number("beam_width", _first(given, model.generation.num_beams, BEAM_WIDTH), 1)


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


@partial(jax.jit, static_argnums=(1, 2))
def _begin(
    passed: Prefill, beam_width: int, room: int, batch_size: Int[Array, ""] | np.integer
) -> Search:
    """Returns a search with one empty hypothesis per row and room for `room` tokens.

    Rows from `batch_size` on only fill a bucket of batch sizes; their search is done.
    """
    batch = len(passed.logits)
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), beam_width)
    empty = jnp.full((batch, beam_width, room), NO_TOKEN, jnp.int32)
    nothing = jnp.full((batch, beam_width), -jnp.inf, jnp.float32)
    is_padding = jnp.arange(batch, dtype=jnp.int32)[:, None] >= batch_size
    live = Beam(empty, nothing.at[:, 0].set(0.0))
    finished = Beam(empty, jnp.where(is_padding, 0.0, nothing))
    cache, logits = passed.cache.gather_rows(rows), passed.logits[rows]
    nowhere = jnp.zeros(batch, bool)
    return Search(cache, logits, live, finished, jnp.int32(0), nowhere, is_padding[:, 0])


def _with_room(search: Search, needed: int, room: int) -> Search:
    """Returns the search with at least `needed` slots and room for `room` tokens."""
    search = search._replace(cache=with_slots(search.cache, needed))
    if search.live.tokens.shape[-1] >= room:
        return search
    live, finished = (_with_tokens(beam, room) for beam in (search.live, search.finished))
    return search._replace(live=live, finished=finished)


@partial(jax.jit, static_argnums=1)
def _with_tokens(beam: Beam, room: int) -> Beam:
    widths = [(0, 0), (0, 0), (0, room - beam.tokens.shape[-1])]
    return beam._replace(tokens=jnp.pad(beam.tokens, widths, constant_values=NO_TOKEN))


@partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _go_on(
    model: LanguageModel,
    weights: Weights,
    search: Search,
    ending: Ending,
    until: Int[Array, ""] | int,
    live: int | None,
) -> tuple[Search, Bool[Array, ""]]:
    """Runs steps until there are `until` tokens or every row is done.

    Steps attend to the first `live` slots. Returns (search, whether every row is done).
    """
    batch, beam_width = search.live.log_probs.shape
    cache = search.cache

    def goes_on(search: Search) -> Bool[Array, ""]:
        return (search.step < until) & ~search.done.all()

    def step(search: Search) -> Search:
        search, parents, tokens = _extend(search, ending)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * beam_width + parents
        cache = search.cache.restored().gather_rows(rows.reshape(-1))
        passed = model.forward(weights, Inputs(tokens.reshape(-1, 1)), cache)
        logits = model.logits(weights, passed.hidden)[:, -1]
        cache = LoopCache.of(passed.cache)
        return search._replace(cache=cache, logits=logits, step=search.step + 1)

    search = search._replace(cache=LoopCache.of(cache.live_prefix(live)))
    search = jax.lax.while_loop(goes_on, step, search)
    after = cache.merge_prefix(search.cache.restored())
    return search._replace(cache=after), search.done.all()


@jax.jit
def _best(search: Search, length_penalty: Exponent) -> Beam:
    """Returns the finished and the unfinished hypotheses of each row, the best first."""
    unfinished = search.live._replace(
        log_probs=jnp.where(search.done[:, None], -jnp.inf, search.live.log_probs)
    )
    beam_width = search.live.log_probs.shape[1]
    return search.finished.concatenated(unfinished).best(beam_width, length_penalty)


def _extend(search: Search, ending: Ending) -> tuple[Search, OfBeam, OfBeam]:
    """Continues every live hypothesis by every token and selects the best results.

    Returns:
        (search, parents, tokens). The search has the new live hypotheses, `parents` the index of
        the hypothesis that each of these continues, and `tokens` their last tokens, both [batch,
        beam_width].
    """
    (batch, beam_width), vocab_size = search.live.log_probs.shape, search.logits.shape[-1]
    log_probs = jax.nn.log_softmax(search.logits)
    if ending.rules is not None:
        generated = search.live.tokens.reshape(batch * beam_width, -1)
        log_probs = ending.rules.apply(log_probs, generated, search.step)
    log_probs = log_probs.reshape(batch, beam_width, vocab_size)
    totals = (search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1)
    broken = search.broken | (~search.done & jnp.isnan(totals).any(axis=1))
    # Enough for beam_width live ones: at most beam_width * len(stops) of the best end with a stop.
    number = min(beam_width * (1 + len(ending.stops)), beam_width * vocab_size)
    best, index = jax.lax.top_k(totals, number)
    parents, tokens = index // vocab_size, index % vocab_size
    extended = search.live.take(parents)._replace(log_probs=best)
    extended = extended._replace(tokens=extended.tokens.at[:, :, search.step].set(tokens))

    stopped = (tokens[:, :, None] == ending.stops).any(axis=-1)
    among_the_best = (jnp.arange(number, dtype=jnp.int32) < beam_width) & ~search.done[:, None]
    ended = jnp.where(stopped & among_the_best, best, -jnp.inf)
    finished = search.finished.concatenated(extended._replace(log_probs=ended))
    goes_on = jax.lax.top_k(jnp.where(stopped, -jnp.inf, best), beam_width)
    live = extended.take(goes_on[1])._replace(log_probs=goes_on[0])
    finished = finished.best(beam_width, ending.length_penalty)
    done = search.done | ending.is_over(live, finished, search.step + 1)
    search = search._replace(live=live, finished=finished, broken=broken, done=done)
    parents, tokens = (jnp.take_along_axis(x, goes_on[1], axis=1) for x in (parents, tokens))
    return search, parents, tokens
