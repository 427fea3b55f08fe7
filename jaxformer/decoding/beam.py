"""Beam search in one compiled loop.

Each step extends every live hypothesis by every token and keeps the `beam_width` most probable
results. A hypothesis that ends with a stop token is finished, and the next most probable live
hypothesis replaces it. The search for a prompt ends when it has `beam_width` finished hypotheses
and no live hypothesis is expected to score better (see `Ending`). With `beam_width` 1, beam search
is greedy decoding. If the beam has room for all possible texts, the search is exhaustive.

The score of a hypothesis is log P / length^length_penalty, where the length includes the stop
token. Penalty 0 ranks by probability, which favours short texts; penalty 1 ranks by the mean log P
per token. Wu et al. (2016, §7) use (5 + length)/6 instead of the length.
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
    compiled_cache,
    model_weights,
    pack_weights,
)
from jaxformer.decoding.batches import Batch, batch_size_within_memory, in_order, make_batches
from jaxformer.decoding.constraints import NO_TOKEN, Rules, build_rules, resolve_constraints
from jaxformer.decoding.generate import Prompts, check_prompts
from jaxformer.decoding.loop_cache import LoopCache, live_slots, slots, with_slots
from jaxformer.decoding.steps import Prefill, prefill
from jaxformer.functional.cache.key_values import Cache, CacheSize
from jaxformer.functional.hooks import NO_HOOKS
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import Sources
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.generation import Constraints
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sequences import padded
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.models.sharding.parameters import to_host

Exponent = float | np.floating | Float[Array, ""]
BeamInts = Int[Array, "batch width"]

BEAM_WIDTH = 4  # Beam width if neither the call nor the checkpoint sets one.


class Hypotheses(NamedTuple):
    """Result of `beam_search`: the hypotheses of each prompt, the best first.

    Attributes:
        tokens: int [batch, num_hypotheses, max_new_tokens], 0 after the end of a hypothesis.
        lengths: int [batch, num_hypotheses], number of tokens, the stop token included; 0 for the
            last entries if the search found fewer than `num_hypotheses` hypotheses.
        scores: float32 [batch, num_hypotheses]; the hypotheses are ranked by their scores.
        log_probs: float32 [batch, num_hypotheses], log P of the whole continuation.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray


class Beam(NamedTuple):
    """Hypotheses of each batch element.

    Attributes:
        tokens: int [batch, width, max_new_tokens], NO_TOKEN after the end of a hypothesis.
        log_probs: float32 [batch, width], log P; −∞ for an unused entry.
    """

    tokens: jax.Array
    log_probs: jax.Array

    def take(self, index: Int[Array, "batch some"]) -> "Beam":
        """Returns the hypotheses with the given indices along the width axis."""
        tokens = jnp.take_along_axis(self.tokens, index[:, :, None], axis=1)
        return Beam(tokens, jnp.take_along_axis(self.log_probs, index, axis=1))

    def concatenate(self, other: "Beam") -> "Beam":
        """Returns one beam with the hypotheses of `self` and `other`."""
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
    """State of a beam search between steps, apart from the cache.

    Attributes:
        logits: [batch · width, vocab], for the next token.
        live: the unfinished hypotheses.
        finished: the finished hypotheses.
        step: int [], number of tokens generated.
        broken: bool [batch], whether any logits were NaN.
        done: bool [batch], whether the search of the batch element is over.
    """

    logits: jax.Array
    live: Beam
    finished: Beam
    step: jax.Array
    broken: jax.Array
    done: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ending:
    """Stopping criteria of a beam search, and constraints on the tokens.

    The search of a batch element continues at least until `beam_width` hypotheses are finished.
    `early_stopping` determines when the search ends:

    - True: The search ends as soon as `beam_width` hypotheses are finished.
    - False: The search ends when no live hypothesis has a better score than the worst finished
      hypothesis.
    - "never": The search ends when an upper bound shows that no live hypothesis can reach a better
      score, at any length, than the worst finished hypothesis.

    Attributes:
        stops: int [stops], ids that end a hypothesis.
        length_penalty: the exponent of the length in scores.
        max_new_tokens: maximum number of tokens per hypothesis.
        early_stopping: True, False or "never".
        rules: constraints on the tokens, or None.
    """

    # The annotations are Any, because JAX transformations also store placeholders in the fields.
    stops: Any
    length_penalty: Any
    max_new_tokens: Any
    early_stopping: bool | Literal["never"] = field(metadata={"static": True})
    rules: Rules | None = None

    def is_over(self, live: Beam, finished: Beam, length: Int[Array, ""]) -> Bool[Array, " batch"]:
        """Returns whether the search of each batch element ends after `length` generated tokens."""
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
    source: Sources | None = None,
    constraints: Constraints | None = None,
    batch_size: int | None = None,
) -> Hypotheses:
    """Finds the `num_hypotheses` best continuations of each prompt by beam search.

    If the search of a prompt has not ended after `max_new_tokens` tokens, its unfinished hypotheses
    are ranked with the finished hypotheses. The memory depends on the length that the hypotheses
    reach, not on `max_new_tokens`.

    Args:
        model: an autoregressive model.
        variables: the model's variables, or the result of `pack_weights`.
        prompts: see `generate`.
        max_new_tokens: see `generate`.
        beam_width: number of live hypotheses per prompt. Defaults to `model.generation.num_beams`,
            or to 4.
        num_hypotheses: number of hypotheses to return, at most `beam_width`.
        length_penalty: the exponent p of the score log P / length^p. Defaults to
            `model.generation.length_penalty`, or to 1.0.
        early_stopping: when the search for a prompt ends; see `Ending`. Defaults to
            `model.generation.early_stopping`, or to False. If `beam_width` is 1, the value is
            always True.
        stop_tokens: see `generate`.
        source: see `generate`.
        constraints: see `generate`. Constraints change log P, and therefore the scores.
        batch_size: see `generate`. Each hypothesis of a batch has its own cache.

    Raises:
        ValueError: An argument is invalid.
        FloatingPointError: Logits of a batch element are not finite.
    """
    require_autoregressive(model)
    check_not_traced("beam_search", variables, prompts, source)
    constraints, defaults = resolve_constraints(model, constraints), model.generation
    beam_width = resolve_beam_width(model, beam_width)
    exponent: float = _first_not_none(length_penalty, defaults.length_penalty, 1.0)
    early_stopping = _first_not_none(early_stopping, defaults.early_stopping, False)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping is {early_stopping!r}; it must be True, False or 'never'")
    early_stopping = beam_width == 1 or early_stopping  # Beam width 1 is greedy decoding.
    if whole_number("num_hypotheses", num_hypotheses, 1) > beam_width:
        raise ValueError(
            f"num_hypotheses is {num_hypotheses}; it must be from 1 to beam_width ({beam_width})"
        )
    if not np.isfinite(exponent):
        raise ValueError(f"length_penalty is {exponent}; it must be finite")
    texts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    weights = model_weights(pack_weights(model, variables))
    most = batch_size_within_memory(
        model, weights, texts, source, max_new_tokens, batch_size, beam_width
    )
    ending = Ending(stops, np.float32(exponent), np.int32(max_new_tokens), early_stopping)
    batches, parts = make_batches(texts, source, most), []
    for batch in batches:
        given, width, sources = batch.prompts, batch.width, batch.source
        rules = build_rules(constraints, given, width, max_new_tokens, stops, sources)
        limits = replace(ending, rules=rules)
        found, broken = _search(model, weights, batch, limits, beam_width, max_new_tokens)
        check_finite_logits(broken, variables, batch.indices)
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
    """Runs the beam search for one batch.

    Returns:
        (the hypotheses, bool [batch] that marks batch elements with NaN logits).
    """
    width, size = batch.width, len(batch.indices)
    live = slots(width + 1)
    cache_size = CacheSize(size, live, most=slots(width + max_new_tokens))
    cache, _ = compiled_cache(model, weights, model.read_source(batch.source), cache_size, NO_HOOKS)
    passed = prefill(model, weights, Inputs(*padded(batch.prompts, width, left=True)), cache)
    cache, search = _init_search(passed, beam_width, live - width, np.int32(batch.batch_size))
    until, over = 0, False
    # Each call of `_run_steps` fills all slots of the cache. More slots are added before the next
    # call.
    while until < max_new_tokens and not over:
        live = slots(width + until + 1)
        until = min(max_new_tokens, live - width)
        cache, search = with_slots(cache, live), _with_room(search, live - width)
        slots_seen = live_slots(cache, live)
        cache, search, over = _run_steps(model, weights, cache, search, ending, until, slots_seen)
    exponent = ending.length_penalty
    beam = _rank(search, exponent)
    scores = to_host(beam.scores(exponent))
    tokens, lengths, log_probs = map(to_host, (beam.tokens, beam.lengths(), beam.log_probs))
    lengths = np.where(np.isfinite(log_probs), lengths, 0)
    tokens = tokens[..., :max_new_tokens]
    tokens = np.where(np.arange(tokens.shape[-1]) < lengths[..., None], tokens, 0)
    tokens = np.pad(tokens, [(0, 0), (0, 0), (0, max_new_tokens - tokens.shape[-1])])
    return Hypotheses(tokens, lengths, scores, log_probs), to_host(search.broken)


def resolve_beam_width(model: LanguageModel, given: int | None) -> int:
    """Returns the beam width of the call, else of the checkpoint, else BEAM_WIDTH.

    Raises:
        ValueError: `given` is not a whole number of at least 1.
    """
    return whole_number(
        "beam_width", _first_not_none(given, model.generation.num_beams, BEAM_WIDTH), 1
    )


def _first_not_none(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


@partial(jax.jit, static_argnums=(1, 2))
def _init_search(
    passed: Prefill, beam_width: int, room: int, batch_size: Int[Array, ""] | np.integer
) -> tuple[Cache, Search]:
    """Returns a cache for all hypotheses, and a search with one empty hypothesis per prompt.

    The hypotheses have room for `room` tokens. Batch elements with an index of `batch_size` or
    more only fill the batch. The search of such an element counts as done.
    """
    batch = len(passed.logits)
    indices = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), beam_width)
    empty = jnp.full((batch, beam_width, room), NO_TOKEN, jnp.int32)
    nothing = jnp.full((batch, beam_width), -jnp.inf, jnp.float32)
    is_padding = jnp.arange(batch, dtype=jnp.int32)[:, None] >= batch_size
    live = Beam(empty, nothing.at[:, 0].set(0.0))
    finished = Beam(empty, jnp.where(is_padding, 0.0, nothing))
    cache, logits = passed.cache.gather_batch(indices), passed.logits[indices]
    nowhere = jnp.zeros(batch, bool)
    return cache, Search(logits, live, finished, jnp.int32(0), nowhere, is_padding[:, 0])


def _with_room(search: Search, room: int) -> Search:
    """Enlarges the token arrays of a search to at least `room` tokens per hypothesis."""
    if search.live.tokens.shape[-1] >= room:
        return search
    live, finished = (_with_tokens(beam, room) for beam in (search.live, search.finished))
    return search._replace(live=live, finished=finished)


@partial(jax.jit, static_argnums=1)
def _with_tokens(beam: Beam, room: int) -> Beam:
    widths = [(0, 0), (0, 0), (0, room - beam.tokens.shape[-1])]
    return beam._replace(tokens=jnp.pad(beam.tokens, widths, constant_values=NO_TOKEN))


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=(2, 3))
def _run_steps(
    model: LanguageModel,
    weights: Weights,
    cache: Cache,
    search: Search,
    ending: Ending,
    until: Int[Array, ""] | int,
    live: int | None,
) -> tuple[Cache, Search, Bool[Array, ""]]:
    """Runs decoding steps until the hypotheses have `until` tokens or the whole batch is done.

    Attention reads the first `live` slots of the cache. Returns (cache, search, whether the whole
    batch is done).
    """
    batch, beam_width = search.live.log_probs.shape

    def goes_on(carry: tuple[LoopCache, Search]) -> Bool[Array, ""]:
        search = carry[1]
        return (search.step < until) & ~search.done.all()

    def step(carry: tuple[LoopCache, Search]) -> tuple[LoopCache, Search]:
        cache, search = carry
        search, parents, tokens = _extend(search, ending)
        indices = jnp.arange(batch, dtype=jnp.int32)[:, None] * beam_width + parents
        gathered = cache.to_cache().gather_batch(indices.reshape(-1))
        passed = model.forward(weights, Inputs(tokens.reshape(-1, 1)), gathered)
        logits = model.logits(weights, passed.hidden)[:, -1]
        return LoopCache.from_cache(passed.cache), search._replace(
            logits=logits, step=search.step + 1
        )

    carry = LoopCache.from_cache(cache.live_prefix(live)), search
    prefix, search = jax.lax.while_loop(goes_on, step, carry)
    return cache.merge_prefix(prefix.to_cache()), search, search.done.all()


@jax.jit
def _rank(search: Search, length_penalty: Exponent) -> Beam:
    """Ranks the finished and the unfinished hypotheses together, the best first."""
    unfinished = search.live._replace(
        log_probs=jnp.where(search.done[:, None], -jnp.inf, search.live.log_probs)
    )
    beam_width = search.live.log_probs.shape[1]
    return search.finished.concatenate(unfinished).best(beam_width, length_penalty)


def _extend(search: Search, ending: Ending) -> tuple[Search, BeamInts, BeamInts]:
    """Extends every live hypothesis by every token and selects the best results.

    Returns:
        (search, parents, tokens). `search` contains the new live and finished hypotheses. For each
        new live hypothesis, `parents` contains the index of the hypothesis that it extends, and
        `tokens` contains its last token. `parents` and `tokens` have the shape [batch, beam_width].
    """
    (batch, beam_width), vocab_size = search.live.log_probs.shape, search.logits.shape[-1]
    log_probs = jax.nn.log_softmax(search.logits)
    if ending.rules is not None:
        generated = search.live.tokens.reshape(batch * beam_width, -1)
        log_probs = ending.rules.apply(log_probs, generated, search.step)
    log_probs = log_probs.reshape(batch, beam_width, vocab_size)
    totals = (search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1)
    broken = search.broken | (~search.done & jnp.isnan(totals).any(axis=1))
    # Of the best `number` extensions, at most beam_width * len(stops) end with a stop token. At
    # least beam_width other extensions remain, which can become live hypotheses.
    number = min(beam_width * (1 + len(ending.stops)), beam_width * vocab_size)
    best, index = jax.lax.top_k(totals, number)
    parents, tokens = index // vocab_size, index % vocab_size
    extended = search.live.take(parents)._replace(log_probs=best)
    extended = extended._replace(tokens=extended.tokens.at[:, :, search.step].set(tokens))

    stopped = (tokens[:, :, None] == ending.stops).any(axis=-1)
    among_the_best = (jnp.arange(number, dtype=jnp.int32) < beam_width) & ~search.done[:, None]
    ended = jnp.where(stopped & among_the_best, best, -jnp.inf)
    finished = search.finished.concatenate(extended._replace(log_probs=ended))
    goes_on = jax.lax.top_k(jnp.where(stopped, -jnp.inf, best), beam_width)
    live = extended.take(goes_on[1])._replace(log_probs=goes_on[0])
    finished = finished.best(beam_width, ending.length_penalty)
    done = search.done | ending.is_over(live, finished, search.step + 1)
    search = search._replace(live=live, finished=finished, broken=broken, done=done)
    parents, tokens = (jnp.take_along_axis(x, goes_on[1], axis=1) for x in (parents, tokens))
    return search, parents, tokens
