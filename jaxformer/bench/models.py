"""Benchmarks of models: training steps, decoding steps, and time to the first token."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.bench.measurement import DType, Measurement, Part, Rounds, TimeSource, Timing
from jaxformer.decoding.autoregressive import model_weights, pack_weights
from jaxformer.decoding.generate import Generation, generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.parameters import init
from jaxformer.models.sharding.parameters import make_mesh
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.mesh import place_batch
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import Measured, init_on, make_step

T = TypeVar("T")
GREEDY = Sampler(temperature=0.0)


class TrainingCase(NamedTuple):
    """Model and batch of a training benchmark.

    Attributes:
        name: The name of the model.
        config: The config of the model.
        length: Tokens per sequence.
        batch_size: Sequences per device. The benchmark halves this number until the step fits into
            memory.
    """

    name: str
    config: TransformerConfig
    length: int
    batch_size: int


def largest_that_fits(make: Callable[[int], T], batch_size: int) -> tuple[int, T]:
    """Calls `make(batch_size)`, and halves the batch size whenever memory runs out.

    Returns:
        (the batch size that fits into memory, the result of `make` for this size).
    """
    while True:
        try:
            return batch_size, make(batch_size)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or batch_size == 1:
                raise
        batch_size //= 2


def measure_step(case: TrainingCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures the step of `jaxformer train`: forward, backward, clipping by norm and AdamW.

    With several devices, the mesh is fsdp=N over all devices. The bytes include two passes over the
    parameters and the optimizer state (reading and writing), but no activations.

    Args:
        case: The model, the sequence length and the number of sequences per device.
        dtype: The dtype of the activations.
        rounds: The limits on the timed rounds.
    """
    model, count = build(replace(case.config, dtype=dtype)), jax.device_count()
    mesh = make_mesh({"fsdp": count}) if count > 1 else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        batch_size, run = largest_that_fits(
            lambda batch_size: RandomStep(model, batch_size * count, case.length, mesh),
            case.batch_size,
        )
        timing = rounds.measure(run)
    batch_size *= count
    return [
        Measurement(
            Part.TRAINING,
            f"{case.name}, {batch_size} × {case.length:,} tokens",
            dtype,
            timing,
            flops=batch_size * training_flops(model, case.length, only_visible=True),
            bytes=2 * run.num_bytes / count,
            tokens=batch_size * case.length,
            devices=count,
        )
    ]


class RandomStep:
    """Training step of `jaxformer train` on random tokens, with its training state."""

    def __init__(
        self, model: LanguageModel, batch_size: int, length: int, mesh: Mesh | None = None
    ):
        """Makes a first training step, which compiles the program.

        The call raises JaxRuntimeError if the step does not fit into memory.

        Args:
            model: A decoder.
            batch_size: The batch size.
            length: Tokens per sequence.
            mesh: The mesh over which the state and the batch are sharded. If None, they are on one
                device.
        """
        optimizer, vocab_size = make_optimizer(OptimizerConfig()), model.config.vocab_size
        tokens = np.random.default_rng(0).integers(
            0, vocab_size, (1, batch_size, length + 1), np.int32
        )
        batch = Batch(tokens[..., :-1], tokens[..., 1:])
        self.batch = jax.device_put(batch) if mesh is None else place_batch(batch, mesh)
        self.state = init_on(mesh, model, optimizer, 0)
        self.step = make_step(model, optimizer)
        jax.block_until_ready(self())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters and the optimizer state."""
        return _num_bytes((self.state.params, self.state.optimizer))

    def __call__(self) -> Measured:
        """Makes a training step and returns its measurements, such as the loss."""
        self.state, measured = self.step(self.state, self.batch)
        return measured


class DecodingCase(NamedTuple):
    """Model and lengths of a decoding benchmark.

    Attributes:
        name: The name of the model.
        config: The config of the model.
        batch_sizes: The batch sizes.
        prompt: The number of tokens per prompt.
        new: The number of tokens after the first new token, a multiple of `decoding.steps.STEPS`.
        long_prompt: The number of tokens of the prompt for measuring the time to the first token.
    """

    name: str
    config: TransformerConfig
    batch_sizes: tuple[int, ...]
    prompt: int
    new: int
    long_prompt: int


def weight_bytes(weights: Weights) -> int:
    """Returns the bytes of packed weights that a decoding step reads, without embedding tables.

    A step reads one row of an embedding table per token. The packed output layer has its own copy
    of a tied token embedding.
    """
    return _num_bytes(weights) - _num_bytes(weights["embedding"])


def least_bytes(model: LanguageModel, ready: Variables, batch_size: int, live: float) -> float:
    """Returns the bytes that a decoding step reads, with `live` cached tokens per sequence."""
    weights = model_weights(ready)
    return weight_bytes(weights) + cache_bytes(model, weights, batch_size, live)


def cache_bytes(model: LanguageModel, weights: Weights, batch_size: int, live: float) -> float:
    """Returns the bytes of the keys and values of `live` tokens per sequence in a cache.

    A layer with a sliding window is counted like a layer with full attention.
    """
    one_token = CacheSize(batch_size, 1, ring=False)
    cache, _ = jax.eval_shape(lambda x: model.init_cache(x, None, one_token), weights)
    return live * _num_bytes(cache.states)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def token_flops(model: LanguageModel, live: int) -> int:
    """Returns the FLOPs of a new token that attends to `live` tokens, including itself."""
    count = partial(forward_flops, model, only_visible=True)
    return count(live) - count(live - 1)


def prefill_flops(model: LanguageModel, length: int) -> int:
    """Returns the FLOPs to read a prompt, with logits for the last token only."""
    head = 2 * model.config.vocab_size * model.config.embed_dim
    return forward_flops(model, length, only_visible=True) - (length - 1) * head


def measure_decoding(case: DecodingCase, dtype: DType, rounds: Rounds) -> list[Measurement]:
    """Measures greedy decoding and the time to the first token, on one device.

    Args:
        case: The model, the batch sizes and the numbers of tokens.
        dtype: The dtype of the weights and the cache.
        rounds: The limits on the timed rounds of each program.
    """
    model = build(replace(case.config, dtype=dtype))
    ready = jax.block_until_ready(
        pack_weights(model, jax.jit(partial(init, model))(jax.random.key(0)))
    )
    steps = (_measure_steps(case, model, ready, size, rounds) for size in case.batch_sizes)
    length = case.long_prompt
    first_token = Measurement(
        Part.FIRST_TOKEN,
        f"{case.name}, prompt of {length} tokens",
        dtype,
        rounds.measure(greedy_run(model, ready, 1, length, 1)),
        flops=prefill_flops(model, length),
        bytes=least_bytes(model, ready, 1, length),
        tokens=length,
    )
    return [*steps, first_token]


def _measure_steps(
    case: DecodingCase, model: LanguageModel, ready: Variables, batch_size: int, rounds: Rounds
) -> Measurement:
    """Measures a decoding step: the time from the first to the last new token, per step."""
    run = greedy_run(model, ready, batch_size, case.prompt, 1 + case.new)
    run()  # The first call compiles the program.
    # The number of cached tokens grows from prompt + 1 to prompt + new. `live` is its mean.
    live = case.prompt + (case.new + 1) / 2
    return Measurement(
        Part.DECODING,
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
    """Returns a function that appends `new` tokens to random prompts of equal lengths."""
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch_size, length))
    return partial(generate, model, ready, prompts, max_new_tokens=new, sampler=GREEDY)


def step_seconds(run: Callable, clock: TimeSource, skip: int = 0) -> float:
    """Returns the seconds between the first and the last call that `run` makes to `on_tokens`.

    `generate` calls `on_tokens` after the first token and after every block of steps. The first
    `skip` blocks are discarded.
    """
    times: list[float] = []
    run(on_tokens=lambda _: times.append(clock()))
    return times[-1] - times[skip]
