"""State and compiled steps of a beam search."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding.cache_slots import with_slots
from jaxformer.decoding.constraints import Rules
from jaxformer.decoding.loop_cache import LoopCache
from jaxformer.decoding.steps import Prefill
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel

Exponent = float | np.floating | Float[Array, ""]


class Beam(NamedTuple):
    """Hypotheses of each row.

    Attributes:
        tokens: int [batch, width, max_new_tokens], −1 after the end.
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
    """Rule that decides when the search of a row is over.

    It is over when the row has `beam_width` finished hypotheses and, unless `early_stopping` is
    True, no live hypothesis can still score better than the worst of them. To decide that, False
    divides the log P of a live hypothesis by its present length; "never" uses an upper bound of its
    score.

    Attributes:
        length_penalty: the exponent of the length in scores.
        max_new_tokens: the most tokens of a hypothesis.
        early_stopping: True, False or "never".
    """

    length_penalty: Any
    max_new_tokens: Any
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})

    def is_over(self, live: Beam, finished: Beam, length: Int[Array, ""]) -> Bool[Array, " batch"]:
        """Returns bool [batch]; `length` is the number of tokens of the live hypotheses."""
        is_full = (finished.log_probs > -jnp.inf).all(axis=1)
        if self.early_stopping is True:
            return is_full
        if self.early_stopping == "never":
            length = jnp.where(self.length_penalty > 0, self.max_new_tokens, length)
        best = live.log_probs.max(axis=1) / length**self.length_penalty
        return is_full & (best <= finished.scores(self.length_penalty).min(axis=1))


class Limits(NamedTuple):
    """What ends hypotheses and constrains their tokens.

    Attributes:
        stops: int [stops], ids that end a hypothesis.
        ending: when the search of a row is over.
        rules: constraints on the tokens; None: no constraints.
    """

    stops: Int[Array | np.ndarray, " stops"]
    ending: Ending
    rules: Rules | None


@partial(jax.jit, static_argnums=(1, 2))
def _begin(
    passed: Prefill, beam_width: int, room: int, batch_size: Int[Array, ""] | np.integer
) -> Search:
    """Returns a search with one empty hypothesis per row and room for `room` tokens.

    Rows from `batch_size` on only fill a bucket of batch sizes; their search is done.
    """
    batch = len(passed.logits)
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), beam_width)
    empty = jnp.full((batch, beam_width, room), -1, jnp.int32)
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
    return beam._replace(tokens=jnp.pad(beam.tokens, widths, constant_values=-1))


@partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _go_on(
    model: LanguageModel,
    weights: Weights,
    search: Search,
    limits: Limits,
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
        search, parents, tokens = _extend(search, limits, beam_width)
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


def _extend(
    search: Search, limits: Limits, beam_width: int
) -> tuple[Search, Int[Array, "batch width"], Int[Array, "batch width"]]:
    """Continues every live hypothesis by every token and selects the best results.

    Returns:
        (search, parents, tokens). The search has the new live hypotheses, `parents` the index of
        the hypothesis that each of these continues, and `tokens` their last tokens, both [batch,
        beam_width].
    """
    batch, vocab_size = search.live.log_probs.shape[0], search.logits.shape[-1]
    log_probs = jax.nn.log_softmax(search.logits)
    if limits.rules is not None:
        generated = search.live.tokens.reshape(batch * beam_width, -1)
        log_probs = limits.rules.apply(log_probs, generated, search.step)
    log_probs = log_probs.reshape(batch, beam_width, vocab_size)
    totals = (search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1)
    broken = search.broken | (~search.done & jnp.isnan(totals).any(axis=1))
    # Enough for beam_width live ones: at most beam_width * len(stops) of the best end with a stop.
    number = min(beam_width * (1 + len(limits.stops)), beam_width * vocab_size)
    best, index = jax.lax.top_k(totals, number)
    parents, tokens = index // vocab_size, index % vocab_size
    extended = search.live.take(parents)._replace(log_probs=best)
    extended = extended._replace(tokens=extended.tokens.at[:, :, search.step].set(tokens))

    stopped = (tokens[:, :, None] == limits.stops).any(axis=-1)
    among_the_best = (jnp.arange(number, dtype=jnp.int32) < beam_width) & ~search.done[:, None]
    ended = jnp.where(stopped & among_the_best, best, -jnp.inf)
    finished = search.finished.concatenated(extended._replace(log_probs=ended))
    goes_on = jax.lax.top_k(jnp.where(stopped, -jnp.inf, best), beam_width)
    live = extended.take(goes_on[1])._replace(log_probs=goes_on[0])
    finished = finished.best(beam_width, limits.ending.length_penalty)
    done = search.done | limits.ending.is_over(live, finished, search.step + 1)
    search = search._replace(live=live, finished=finished, broken=broken, done=done)
    parents, tokens = (jnp.take_along_axis(x, goes_on[1], axis=1) for x in (parents, tokens))
    return search, parents, tokens
