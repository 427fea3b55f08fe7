"""Decoding with `generate`: seconds per token, and seconds to the first token of a prompt."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.bench.measurement import DECODING, FIRST_TOKEN, DType, Measurement
from jaxformer.bench.timing import Rounds, TimeSource, Timing
from jaxformer.decoding.generate import generate
from jaxformer.decoding.prepared import prepare, weights_of
from jaxformer.decoding.result import Generation
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.flops import forward_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.parameters import init

GREEDY = Sampler(temperature=0.0)


class DecodingCase(NamedTuple):
    """Model and lengths of decoding.

    Attributes:
        name: The name of the model.
        config: Its config.
        batch_sizes: The batch sizes.
        prompt: Tokens of each prompt.
        new: Tokens that follow the first new one, a multiple of a block (`decoding.steps.STEPS`).
        long_prompt: Tokens of the prompt whose first new token is timed.
    """

    name: str
    config: TransformerConfig
    batch_sizes: tuple[int, ...]
    prompt: int
    new: int
    long_prompt: int


def weight_bytes(weights: Weights) -> int:
    """Returns the bytes of the prepared weights that a step reads: all but the tables of vectors.

    A step reads one row of them per token. The head has its own copy of a tied token table.
    """
    return _num_bytes(weights) - _num_bytes(weights["embedding"])


def least_bytes(model: LanguageModel, ready: Variables, batch_size: int, live: float) -> float:
    """Returns the bytes of a step after `live` tokens in each row: the weights and the cache."""
    weights = weights_of(ready)
    return weight_bytes(weights) + cache_bytes(model, weights, batch_size, live)


def cache_bytes(model: LanguageModel, weights: Weights, batch_size: int, live: float) -> float:
    """Returns the bytes of the keys and values of `live` tokens in each row of a cache.

    Layers with a window are counted like the others.
    """
    one_token = CacheSize(batch_size, 1, ring=False)
    cache, _ = jax.eval_shape(lambda x: model.start(x, None, one_token), weights)
    return live * _num_bytes(cache.states)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def token_flops(model: LanguageModel, live: int) -> int:
    """Returns the operations for one new token that sees `live` tokens, itself included."""
    count = partial(forward_flops, model, only_visible=True)
    return count(live) - count(live - 1)


def prefill_flops(model: LanguageModel, length: int) -> int:
    """Returns the operations to read a prompt; only its last token needs logits."""
    head = 2 * model.config.vocab_size * model.config.embed_dim
    return forward_flops(model, length, only_visible=True) - (length - 1) * head


def measure_decoding(case: DecodingCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures greedy decoding on one device, and the time to the first token.

    Args:
        case: The model and the lengths.
        dtype: The dtype of the weights and of the cache.
        rounds: How often each program is timed.
    """
    config = replace(case.config, dtype=dtype)
    model = build(config)
    variables = jax.jit(partial(init, model))(jax.random.key(0))
    ready = jax.block_until_ready(prepare(model, variables))
    del variables
    steps = (_measure_steps(case, model, ready, size, rounds) for size in case.batch_sizes)
    return [*steps, _measure_first_token(case, model, ready, rounds)]


def _measure_steps(
    case: DecodingCase, model: LanguageModel, ready: Variables, batch_size: int, rounds: Rounds
) -> Measurement:
    """Measures one step: the time between the first new token and the last one, divided by n."""
    run = greedy_run(model, ready, batch_size, case.prompt, 1 + case.new)
    run()  # compiles
    live = case.prompt + (case.new + 1) / 2  # the mean of prompt + 1 … prompt + n
    return Measurement(
        DECODING,
        f"{case.name}, batch {batch_size}",
        model.config.dtype,
        Timing.of(rounds.repeat(lambda: step_seconds(run, rounds.clock)), case.new),
        flops=batch_size * token_flops(model, round(live)),
        bytes=least_bytes(model, ready, batch_size, live),
        tokens=batch_size,
        note=f"{case.prompt} + {case.new} tokens",
    )


def greedy_run(
    model: LanguageModel, ready: Variables, batch_size: int, length: int, new: int
) -> Callable[..., Generation]:
    """Returns a call of `generate` that appends `new` tokens to random prompts of equal lengths."""
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch_size, length))
    return partial(generate, model, ready, prompts, max_new_tokens=new, sampler=GREEDY)


def step_seconds(run: Callable, clock: TimeSource, skip: int = 0) -> float:
    """Returns the seconds between the first call of `on_tokens` by `run` and the last one.

    `generate` calls it for the first token, which it chooses after reading the prompt, and then
    after every block of steps. The first `skip` blocks do not count.
    """
    times: list[float] = []
    run(on_tokens=lambda _: times.append(clock()))
    return times[-1] - times[skip]


def _measure_first_token(
    case: DecodingCase, model: LanguageModel, ready: Variables, rounds: Rounds
) -> Measurement:
    length = case.long_prompt
    return Measurement(
        FIRST_TOKEN,
        f"{case.name}, prompt of {length} tokens",
        model.config.dtype,
        rounds.measure(greedy_run(model, ready, 1, length, 1)),
        flops=prefill_flops(model, length),
        bytes=least_bytes(model, ready, 1, length),
        tokens=length,
    )
