"""Decoding loop of `generate`: one prefill of the prompts, then compiled blocks of steps.

A block is a `lax.scan` with a fixed number of steps, so an accelerator does not wait for the host
within a block. After each block, the host checks whether every sequence has stopped. Shapes are
rounded up so that few programs are compiled: prompt lengths and batch sizes to 2ⁿ or 3 · 2ⁿ, cache
sizes to 3 · 2ⁿ. The cache starts with the slots that the first block needs, and grows with the
sequences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer.decoding.autoregressive import (
    check_finite_logits,
    check_not_traced,
    compiled_cache,
    model_weights,
    pack_weights,
)
from jaxformer.decoding.batches import (
    Batch,
    batch_size_within_memory,
    in_order,
    make_batches,
    single_batch,
)
from jaxformer.decoding.constraints import NO_TOKEN, build_rules, resolve_constraints
from jaxformer.decoding.grammars import BatchMatcher, Grammar
from jaxformer.decoding.loop_cache import live_slots, slots, with_slots
from jaxformer.decoding.sampling import Sampler, default_sampler
from jaxformer.decoding.steps import (
    MASKED_VALUES,
    STEPS,
    DecodedChunk,
    TokenSelection,
    choose_first,
    decode_chunk,
    prefill,
)
from jaxformer.decoding.stop_strings import StopStrings
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.hooks import Hooks, Intervention
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import Sources, checked_hooks
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.generation import Constraints
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sequences import id_sequence, padded
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.models.sharding.parameters import to_host

Prompts = Sequence[Sequence[int]] | Int[Array | np.ndarray, "batch length"]


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
        tokens: int [batch, max_new_tokens], 0 after the end of a sequence.
        lengths: int [batch], number of new tokens, the stop token included.
        log_probs: float32 [batch, max_new_tokens], log P of each token under the model, before
            temperature and truncation, 0 after the end of a sequence.
        captured: {name: [layers, batch, max_new_tokens, …]}. Entry t was computed by the step that
            predicted token t; entries after the end of a sequence are 0. Values from hook points
            outside the layers have no layer axis. The last axis of "attention.scores" and
            "attention.weights" holds the positions of the sequence, starting with the prompt.
            Values from hook points of an encoder, which runs once, have the shape
            [layers, sources, …].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    captured: dict[str, np.ndarray]


@in_auto_axes
def generate(
    model: LanguageModel,
    variables: Variables,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | None = None,
    stop_tokens: Iterable[int] = (),
    source: Sources | None = None,
    constraints: Constraints | None = None,
    stop_strings: StopStrings | None = None,
    grammar: Grammar | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    batch_size: int | None = None,
    capture: Iterable[str] = (),
    patch: Mapping[str, Intervention] | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    The prompts are sorted into batches of similar lengths; the results have the caller's order. The
    memory depends on the length that the sequences reach, not on `max_new_tokens`. Batch sizes are
    rounded up, except with `patch`; the results of the added elements are dropped. With `capture`
    or `patch`, all prompts form one batch, because captured values and patches have a batch axis.

    Args:
        model: an autoregressive model.
        variables: the model's variables, or the result of `pack_weights`.
        prompts: nonempty lists of token ids, of any lengths, or an int array [batch, length].
        max_new_tokens: maximum number of new tokens per prompt.
        sampler: the sampling parameters. Defaults to the sampler of `model.generation`, or to
            Sampler().
        key: a jax.random key, required unless the sampler is greedy. The t-th token of prompt i is
            sampled with fold_in(fold_in(key, i), t), so it does not depend on other prompts.
        stop_tokens: ids, each of which ends a sequence.
        source: for an encoder-decoder, the source of each prompt: token ids, or embeddings [length,
            embed_dim], or features [length, source_features] if the config sets `source_features`.
        constraints: constraints on the next token. Defaults to `model.generation.constraints`.
        stop_strings: texts, each of which ends a sequence.
        grammar: the texts that may be generated, for example from `json_schema`. With a grammar,
            `stop_tokens` is required, and each token needs a separate compiled call.
        on_tokens: called after every block of decoding steps with one list of new tokens per
            prompt. A prompt outside the current batch gets an empty list.
        batch_size: maximum number of prompts per batch. By default, a batch has at most 16,384
            prompt tokens, and its caches and logits need at most 1 GiB with `max_new_tokens` new
            tokens. With a mesh in context, the default is all prompts.
        capture: names of hook points to capture, from `model.hook_points`.
        patch: the values to change, {name of a hook point: Patch or Edit}. A Patch or an Edit may
            be limited to certain positions and steps.

    Returns:
        A `Generation`: the new tokens of each prompt with their lengths and log-probabilities, and
        the captured values.

    Raises:
        ValueError: An argument is invalid.
        FloatingPointError: Logits of a batch element are not finite.
    """
    require_autoregressive(model)
    check_not_traced("generate", variables, prompts, source, key)
    sampler = default_sampler(model.generation) if sampler is None else sampler
    constraints = resolve_constraints(model, constraints)
    if key is None and not sampler.greedy:
        raise ValueError(
            f"key is None, but sampling at temperature {sampler.temperature} needs a random key; "
            "pass jax.random.key(seed), or use temperature 0"
        )
    if key is not None and not is_key(key):
        raise ValueError(f"key is {key!r}; it must be a single key from jax.random.key(seed)")
    texts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    weights = model_weights(pack_weights(model, variables))
    hooks = checked_hooks(
        capture,
        patch,
        model.hook_points,
        # The last generated token is never an input.
        length=max(map(len, texts)) + max_new_tokens - 1,
        source_length=None if source is None else max(map(len, source)),
        steps=max_new_tokens,
    )
    if stop_strings is not None and not isinstance(stop_strings, StopStrings):
        raise ValueError(
            f"stop_strings is {stop_strings!r:.60}; it must be a "
            "jaxformer.StopStrings(tokenizer, texts)"
        )
    if grammar is not None and not isinstance(grammar, Grammar):
        raise ValueError(
            f"grammar is {grammar!r:.60}; it must be a grammar, such as the result of "
            "jaxformer.json_schema(tokenizer, schema)"
        )
    if grammar is not None and not stops.size:
        raise ValueError("grammar needs stop_tokens, with which the model ends the text")
    table = None if stop_strings is None else stop_strings.table(model.config.vocab_size)
    choice = TokenSelection(
        sampler.arrays(),
        None if sampler.greedy else key,
        stops,
        stop_table=None if table is None else jnp.asarray(table),
    )
    call = _Call(
        model,
        variables,
        weights,
        choice,
        constraints,
        grammar,
        max_new_tokens,
        len(texts),
        hooks,
        on_tokens,
    )
    most = batch_size_within_memory(model, weights, texts, source, max_new_tokens, batch_size)
    # The batch axis of a patch has one entry per prompt, in the caller's order.
    if hooks.patch:
        batches = [single_batch(texts, source, len(texts))]
    else:
        batches = make_batches(texts, source, len(texts) if hooks.capture else most)
    return in_order([_generate_batch(call, batch) for batch in batches], batches)


@dataclass(frozen=True)
class _Call:
    """The arguments of a `generate` call that all batches share.

    Attributes:
        choice: how tokens are chosen, without the fields that depend on the batch.
        num_prompts: number of prompts in the call.
    """

    model: LanguageModel
    variables: Variables
    weights: Weights
    choice: TokenSelection
    constraints: Constraints
    grammar: Grammar | None
    max_new_tokens: int
    num_prompts: int
    hooks: Hooks
    on_tokens: Callable[[list[list[int]]], None] | None

    def start_matchers(self, batch: Batch) -> BatchMatcher | None:
        """Returns the matchers of a batch, or None without a grammar."""
        if self.grammar is None:
            return None
        vocab_size, stops = self.model.config.vocab_size, np.asarray(self.choice.stops).tolist()
        size = len(batch.indices)
        return BatchMatcher(self.grammar, batch.batch_size, size, vocab_size, stops)

    def report(self, tokens: Int[np.ndarray, "steps batch"], batch: Batch) -> None:
        """Calls `on_tokens` once, with the new tokens of each prompt.

        The list is empty for a prompt that is not in the batch.
        """
        if self.on_tokens is None:
            return
        found: list[list[int]] = [[] for _ in range(self.num_prompts)]
        for index, ids in zip(batch.own_indices, tokens[:, : batch.batch_size].T, strict=True):
            found[index] = ids[ids != NO_TOKEN].tolist()
        self.on_tokens(found)


def _generate_batch(call: _Call, batch: Batch) -> Generation:
    """Continues the prompts of one batch."""
    model, weights, hooks, most = call.model, call.weights, call.hooks, call.max_new_tokens
    texts, source, width, size = batch.prompts, batch.source, batch.width, len(batch.indices)
    matchers = call.start_matchers(batch)
    rules = build_rules(call.constraints, texts, width, most, call.choice.stops, source)
    first_slots = slots(width + (STEPS if most > 1 else 0))
    num_keys = slots(width + -(-(most - 1) // STEPS) * STEPS)
    # Captured attention scores and weights must have the same number of keys in all layers.
    ring = False if MASKED_VALUES.keys() & {*hooks.capture, *hooks.patch} else None
    cache_size, sources = CacheSize(size, first_slots, ring, num_keys), model.read_source(source)
    cache, read = compiled_cache(model, weights, sources, cache_size, hooks.at_step(0))
    passed = prefill(model, weights, Inputs(*padded(texts, width, left=True)), cache, hooks)
    found, room = [], most
    choice = call.choice._replace(
        rules=rules,
        indices=batch.indices.astype(np.int32),
        allowed=None if matchers is None else matchers.allowed,
    )
    # With a grammar, each token determines the next allowed tokens, so a block has one step.
    block = STEPS if matchers is None else 1
    generated = None if rules is None else np.full((size, num_keys), NO_TOKEN, np.int32)
    batch_size = np.int32(batch.batch_size)
    state, new = choose_first(passed.logits, passed.captured, choice, batch_size, generated)
    cache = passed.cache
    while True:
        found.append(jax.tree.map(to_host, new))
        tokens, log_probs, _ = found[-1]
        check_finite_logits(np.isnan(log_probs[:room]).any(axis=0), call.variables, batch.indices)
        call.report(tokens[:room], batch)
        room -= len(tokens)
        if room <= 0 or to_host(state.stopped).all():
            break
        if matchers is not None:
            matchers.push(tokens[-1])
            choice = choice._replace(allowed=matchers.allowed)
        needed = width + most - room - 1 + block
        cache = with_slots(cache, needed)
        live = live_slots(cache, needed)
        cache, state, new = decode_chunk(model, weights, cache, state, choice, live, hooks, block)
    return _collect(call, batch, found, jax.tree.map(to_host, read), num_keys)


def _collect(
    call: _Call,
    batch: Batch,
    blocks: Sequence[DecodedChunk],
    read: Mapping[str, np.ndarray],
    num_keys: int,
) -> Generation:
    """Concatenates the outputs of all steps of a batch, and drops the added batch elements.

    Args:
        call: the arguments of `generate` that all batches share.
        batch: the batch.
        blocks: the outputs of all decoding steps. Each entry contains a block of several steps.
        read: the values captured while the sources were encoded.
        num_keys: number of keys in the result's attention scores and weights. Earlier blocks have
            fewer keys, because the cache was smaller. Their values are padded to this number.
    """
    number, most, layer_hook_points = (
        batch.batch_size,
        call.max_new_tokens,
        call.model.layer_hook_points,
    )

    def joined(steps: Sequence[Array | np.ndarray], fill: int = 0) -> np.ndarray:
        whole = np.concatenate(steps)[:most]
        widths = [(0, most - len(whole)), *[(0, 0)] * (whole.ndim - 1)]
        return np.pad(whole, widths, constant_values=fill)

    def without_filling(name: str, x: np.ndarray) -> np.ndarray:
        return x[:, :number] if name in layer_hook_points else x[:number]

    tokens = joined([block.tokens for block in blocks], NO_TOKEN).T[:number]
    log_probs = joined([block.log_probs for block in blocks]).T[:number]
    is_there = tokens != NO_TOKEN
    captured = {name: without_filling(name, x) for name, x in read.items()}
    for name in blocks[0].captured:
        steps = [block.captured[name] for block in blocks]
        if name in MASKED_VALUES:
            lengths = [len(x) for x in batch.prompts]
            steps = [
                _by_position(x, lengths, batch.width, num_keys, MASKED_VALUES[name]) for x in steps
            ]
        batch_axis = 1 if name in layer_hook_points else 0
        x = without_filling(name, np.moveaxis(joined(steps), 0, batch_axis + 1))
        mask = is_there.reshape(*is_there.shape, *[1] * (x.ndim - batch_axis - 2))
        captured[name] = np.where(mask, x, 0)
    return Generation(np.where(is_there, tokens, 0), is_there.sum(axis=1), log_probs, captured)


def _by_position(
    steps: Array | np.ndarray, lengths: Sequence[int], width: int, num_keys: int, masked: float
) -> np.ndarray:
    """Converts the key axis of attention from cache slots to positions in the sequence.

    Args:
        steps: attention scores or weights of a block of steps, [steps, layers, batch, …, slots].
        lengths: number of prompt tokens of each sequence. Every prompt ends at slot `width - 1`.
        width: number of tokens to which the prompts are padded on the left.
        num_keys: number of positions in the result.
        masked: the value at positions without a slot.
    """
    found = np.full((*steps.shape[:-1], num_keys), masked, steps.dtype)
    for index, length in enumerate(lengths):
        of_sequence = steps[:, :, index, ..., width - length :]
        found[:, :, index, ..., : of_sequence.shape[-1]] = of_sequence
    return found


def is_key(key: object) -> bool:
    """Returns whether `key` is a single random key: a typed key or a legacy uint32 [2] key."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape == ()
    return dtype == jnp.uint32 and shape == (2,)


def check_prompts(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    stop_tokens: Iterable[int],
    source: Sources | None,
) -> tuple[list[np.ndarray], Int[np.ndarray, " stops"]]:
    """Checks the prompts and the stop tokens and returns both as arrays.

    Raises:
        ValueError: a prompt, a stop token, `max_new_tokens` or the number of sources is
            invalid.
    """
    config = model.config
    whole_number("max_new_tokens", max_new_tokens, 1)
    if not isinstance(stop_tokens, Iterable):
        raise ValueError(f"stop_tokens is {stop_tokens!r}; it must be an iterable of token ids")
    stops = id_sequence("stop_tokens", list(stop_tokens), config.vocab_size)
    texts = [id_sequence(f"prompt {i}", text, config.vocab_size) for i, text in enumerate(prompts)]
    if not texts:
        raise ValueError("prompts is empty; it must hold at least one prompt")
    for i, ids in enumerate(texts):
        if not ids.size:
            raise ValueError(f"prompt {i} is empty; a prompt needs at least one token")
        if ids.size < model.minimum_prefill:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens, but this model's prompts need at least "
                f"{model.minimum_prefill} (the length of its bidirectional prefix)"
            )
        if ids.size + max_new_tokens > config.max_length:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens and max_new_tokens is {max_new_tokens}; "
                f"their sum must not exceed max_length ({config.max_length})"
            )
    if source is not None and len(source) != len(texts):
        raise ValueError(
            f"there are {len(source)} sources and {len(texts)} prompts; pass one source per prompt"
        )
    return texts, np.unique(stops).astype(np.int32)
