"""Beam search: the most probable continuations, several at once, by one compiled loop.

At each step every live hypothesis is continued by every token, and the most probable `beam_width`
of all these stay. One whose last token is a stop token is finished, and makes room for the next
live one. A row is done when it has as many finished hypotheses as the beam is wide. So a beam of
width 1 is greedy decoding, and one as wide as there are texts is an exhaustive search.

Hypotheses are ranked by log P / length^length_penalty, the stop token counted: at 0 by their
probability, which favours short ones; at 1 by the mean over their tokens (Wu et al. 2016, §7,
divide by (5 + length)/6 in place of the length).
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.autoregressive import (
    live_slots,
    prompt_bucket,
    refuse_broken,
    refuse_tracers,
    slots,
    start,
)
from jaxformer.decoding.generate import STEPS, Prefill, check_prompts, prefill
from jaxformer.decoding.prepared import prepared_variables, weights_of
from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.models.config.check import whole_number
from jaxformer.models.placement import to_host
from jaxformer.models.rows import padded


class Hypotheses(NamedTuple):
    """The best first. tokens: int [batch, num_hypotheses, max_new_tokens], 0 after the end;
    lengths: int [batch, num_hypotheses], the stop token counted, 0 where there are no more; scores:
    float32, by which they are ranked; log_probs: float32, log P of the whole continuation."""

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray


class Beam(NamedTuple):
    """Hypotheses of each row: their tokens [batch, width, max_new_tokens], −1 after the end, and
    log P [batch, width], −∞ where there is none."""

    tokens: jax.Array
    log_probs: jax.Array

    def take(self, index) -> "Beam":
        """Those at index [batch, some]."""
        tokens = jnp.take_along_axis(self.tokens, index[:, :, None], axis=1)
        return Beam(tokens, jnp.take_along_axis(self.log_probs, index, axis=1))

    def concatenated(self, other: "Beam") -> "Beam":
        return Beam(*(jnp.concatenate(pair, axis=1) for pair in zip(self, other, strict=True)))

    def lengths(self):
        return (self.tokens >= 0).sum(axis=-1)

    def scores(self, length_penalty):
        return self.log_probs / jnp.maximum(self.lengths(), 1) ** length_penalty

    def best(self, number: int, length_penalty) -> "Beam":
        return self.take(jax.lax.top_k(self.scores(length_penalty), number)[1])


class Search(NamedTuple):
    """What a step leaves for the next."""

    cache: object
    logits: jax.Array  # [batch · width, vocab], of the last token read
    live: Beam
    finished: Beam
    step: jax.Array  # int [], tokens generated
    broken: jax.Array  # bool [batch], a hypothesis was continued from logits that are NaN

    def done(self):
        """bool [batch]: the row has as many finished hypotheses as it may."""
        return (self.finished.log_probs > -jnp.inf).all(axis=1)


def beam_search(
    model,
    variables,
    prompts,
    *,
    max_new_tokens: int,
    beam_width: int = 4,
    num_hypotheses: int = 1,
    length_penalty: float = 1.0,
    stop_tokens: Iterable[int] = (),
    source=None,
) -> Hypotheses:
    """The num_hypotheses best continuations of each prompt that a beam of this width finds.

    prompts, stop_tokens, source: as for `generate`. A hypothesis that has not stopped after
    max_new_tokens counts as it is, unless its row was done before. FloatingPointError if logits are
    not finite.
    """
    require_autoregressive(model)
    refuse_tracers("beam_search", variables, prompts, source)
    beam_width = whole_number("beam_width", beam_width, 1)
    if whole_number("num_hypotheses", num_hypotheses, 1) > beam_width:
        raise ValueError(
            f"num_hypotheses is {num_hypotheses}; it must be in 1 … beam_width ({beam_width})"
        )
    if not np.isfinite(length_penalty):
        raise ValueError(f"length_penalty is {length_penalty}; it must be finite")
    prompts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    variables = prepared_variables(model, variables)
    weights, width = weights_of(variables), prompt_bucket(max(map(len, prompts)))
    room = -(-max_new_tokens // STEPS) * STEPS  # a program for a few values, not for each
    cache = start(model, variables, len(prompts), slots(width + room), source)
    passed = prefill(model, weights, *padded(prompts, width, left=True), cache)
    search, until, over = _begin(passed, beam_width, room), 0, False
    penalty = np.float32(length_penalty)
    while until < max_new_tokens and not over:  # until the live slots are full, then with more
        live = live_slots(search.cache, width + until + 1)
        until = max_new_tokens if live is None else min(max_new_tokens, live - width)
        search, over = _go_on(model, weights, search, stops, penalty, until, live)
    beam = _best(search, penalty)
    refuse_broken(to_host(search.broken), variables)
    scores = to_host(beam.scores(length_penalty))
    tokens, lengths, log_probs = map(to_host, (beam.tokens, beam.lengths(), beam.log_probs))
    lengths, tokens = np.where(np.isfinite(log_probs), lengths, 0), tokens[..., :max_new_tokens]
    tokens = np.where(np.arange(max_new_tokens) < lengths[..., None], tokens, 0)
    found = (tokens, lengths, scores, log_probs)
    return Hypotheses(*(x[:, :num_hypotheses] for x in found))


@partial(jax.jit, static_argnums=(1, 2))
def _begin(passed: Prefill, beam_width: int, room: int) -> Search:
    """One empty hypothesis for each row, not beam_width of them; room for so many tokens."""
    batch = len(passed.logits)
    rows = jnp.repeat(jnp.arange(batch), beam_width)
    empty = jnp.full((batch, beam_width, room), -1)
    nothing = jnp.full((batch, beam_width), -jnp.inf)
    live, finished = Beam(empty, nothing.at[:, 0].set(0.0)), Beam(empty, nothing)
    cache, logits = passed.cache.gather_rows(rows), passed.logits[rows]
    return Search(cache, logits, live, finished, jnp.int32(0), jnp.zeros(batch, bool))


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def _go_on(model, weights, search: Search, stops, length_penalty, until, live: int | None):
    """Steps, attending to the first `live` slots, until there are `until` tokens or every row is
    done; returns (search, whether every row is)."""
    batch, beam_width = search.live.log_probs.shape
    whole = search.cache

    def goes_on(search):
        return (search.step < until) & ~search.done().all()

    def step(search):
        search, parents, tokens = _extend(search, stops, length_penalty, beam_width)
        rows = jnp.arange(batch)[:, None] * beam_width + parents
        cache = search.cache.gather_rows(rows.reshape(-1))
        passed = model.forward(weights, tokens.reshape(-1, 1), cache=cache)
        logits = model.logits(weights, passed.hidden)[:, -1]
        return search._replace(cache=passed.cache, logits=logits, step=search.step + 1)

    search = jax.lax.while_loop(goes_on, step, search._replace(cache=whole.live_prefix(live)))
    return search._replace(cache=whole.merge_prefix(search.cache)), search.done().all()


@jax.jit
def _best(search: Search, length_penalty) -> Beam:
    """The finished and the unfinished hypotheses of each row, the best first."""
    unfinished = search.live._replace(
        log_probs=jnp.where(search.done()[:, None], -jnp.inf, search.live.log_probs)
    )
    beam_width = search.live.log_probs.shape[1]
    return search.finished.concatenated(unfinished).best(beam_width, length_penalty)


def _extend(search: Search, stops, length_penalty, beam_width: int):
    """Continue every live hypothesis by every token, and keep the best.

    Returns (search, parents, tokens): the new live ones and, [batch, beam_width], which old one
    each goes on from and by what token.
    """
    batch, vocab_size = search.live.log_probs.shape[0], search.logits.shape[-1]
    log_probs = jax.nn.log_softmax(search.logits).reshape(batch, beam_width, vocab_size)
    totals = (search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1)
    broken = search.broken | (~search.done() & jnp.isnan(totals).any(axis=1))
    # Enough that beam_width of them go on, even if every hypothesis could stop as well.
    number = min(beam_width * (1 + len(stops)), beam_width * vocab_size)
    best, index = jax.lax.top_k(totals, number)
    parents, tokens = index // vocab_size, index % vocab_size
    extended = search.live.take(parents)._replace(log_probs=best)
    extended = extended._replace(tokens=extended.tokens.at[:, :, search.step].set(tokens))

    stopped = (tokens[:, :, None] == stops).any(axis=-1)
    among_the_best = (jnp.arange(number) < beam_width) & ~search.done()[:, None]
    ended = jnp.where(stopped & among_the_best, best, -jnp.inf)
    finished = search.finished.concatenated(extended._replace(log_probs=ended))
    goes_on = jax.lax.top_k(jnp.where(stopped, -jnp.inf, best), beam_width)
    search = search._replace(
        live=extended.take(goes_on[1])._replace(log_probs=goes_on[0]),
        finished=finished.best(beam_width, length_penalty),
        broken=broken,
    )
    parents, tokens = (jnp.take_along_axis(x, goes_on[1], axis=1) for x in (parents, tokens))
    return search, parents, tokens
