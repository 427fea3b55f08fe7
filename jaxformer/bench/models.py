"""Programs of models: training steps, decoding steps, and the first token after a prompt."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.bench.measurement import DType, Measurement, Part, Rounds, TimeSource, Timing
from jaxformer.decoding.autoregressive import prepare, weights_of
from jaxformer.decoding.generate import Generation, generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.trees import Weights
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import make_mesh
from jaxformer.models.parameters import init
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.mesh import place_batch
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import Measured, init_on, make_step

T = TypeVar("T")
GREEDY = Sampler(temperature=0.0)


class TrainingCase(NamedTuple):
    """Model and batch of a training step.

    Attributes:
        name: The name of the model.
        config: Its config.
        length: Tokens per row.
        batch_size: Rows per device. It is halved until the step fits into memory.
    """

    name: str
    config: TransformerConfig
    length: int
    batch_size: int


def largest_that_fits(make: Callable[[int], T], batch_size: int) -> tuple[int, T]:
    """Calls make(batch_size), with half the batch size after each time that memory runs out.

    Returns:
        (the batch size that fits, the result of `make`).
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

    On several devices it runs on the mesh fsdp=N of all devices. A step moves the parameters and
    the optimizer state at least twice: it reads and writes them. Activations are not counted.

    Args:
        case: The model and the batch.
        dtype: The dtype of the activations.
        rounds: How often the step is timed.
    """
    model, count = build(replace(case.config, dtype=dtype)), jax.device_count()
    mesh = make_mesh({"fsdp": count}) if count > 1 else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        rows, run = largest_that_fits(
            lambda rows: RandomStep(model, rows * count, case.length, mesh), case.batch_size
        )
        timing = rounds.measure(run)
    rows *= count
    return [
        Measurement(
            Part.TRAINING,
            f"{case.name}, {rows} × {case.length:,} tokens",
            dtype,
            timing,
            flops=rows * training_flops(model, case.length, only_visible=True),
            bytes=2 * run.num_bytes / count,
            tokens=rows * case.length,
            devices=count,
        )
    ]


class RandomStep:
    """The step of `jaxformer train` for random tokens, which keeps its state between calls."""

    def __init__(self, model: LanguageModel, rows: int, length: int, mesh: Mesh | None = None):
        """Makes a first update, which compiles the program and shows that it fits into memory.

        Args:
            model: A decoder.
            rows: Rows of the batch.
            length: Tokens per row.
            mesh: The mesh that shards state and batch; None: one device.
        """
        optimizer, vocab_size = make_optimizer(OptimizerConfig()), model.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocab_size, (1, rows, length + 1), np.int32)
        batch = Batch(tokens[..., :-1], tokens[..., 1:])
        self.batch = jax.device_put(batch) if mesh is None else place_batch(batch, mesh)
        self.state = init_on(mesh, model, optimizer, 0)
        self.step = make_step(model, optimizer)
        jax.block_until_ready(self())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters and of the optimizer state."""
        return _num_bytes((self.state.params, self.state.optimizer))

    def __call__(self) -> Measured:
        """Makes an update. Returns its measurements."""
        self.state, measured = self.step(self.state, self.batch)
        return measured


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
    model = build(replace(case.config, dtype=dtype))
    ready = jax.block_until_ready(prepare(model, jax.jit(partial(init, model))(jax.random.key(0))))
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
    """Measures one step: the time between the first new token and the last one, divided by n."""
    run = greedy_run(model, ready, batch_size, case.prompt, 1 + case.new)
    run()  # compiles
    live = case.prompt + (case.new + 1) / 2  # the mean of prompt + 1 … prompt + n
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
