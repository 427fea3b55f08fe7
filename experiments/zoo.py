"""Compares an RNN, an LSTM, a causal CNN and a Transformer of one size on the same text.

    python experiments/zoo.py                  # the standard library's source
    python experiments/zoo.py TEXT… --steps 800

The script plots the loss against the training step and against the time. The script also plots the
tokens per second of training, and of decoding at early and late positions. A decoding step of the
Transformer becomes slower with the number of previous tokens. The steps of the other models take
constant time, because their caches have a fixed size.
"""

import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from record import at_least, conclude, run
from windows import batches, loss, read_windows, text_parser

import jaxformer as jf
from jaxformer.bench.measurement import time_alternately
from jaxformer.bench.models import greedy_run, step_seconds
from jaxformer.decoding.steps import STEPS
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

VOCAB, LENGTH, BATCH, HELD_OUT = 1024, 128, 16, 64
COMMON = {"vocab_size": VOCAB, "max_length": 4096}
# Each model has 1.26 to 1.28 million parameters.
MODELS = {
    "RNN": jf.RecurrentConfig(**COMMON, cell="rnn", embed_dim=448, num_layers=2),
    "LSTM": jf.RecurrentConfig(**COMMON, cell="lstm", embed_dim=252, num_layers=2),
    "causal CNN": jf.ConvolutionalConfig(
        **COMMON, embed_dim=196, num_layers=7, kernel_size=4, dilation_growth=2
    ),
    "Transformer": jf.DecoderConfig(
        **COMMON, embed_dim=152, num_layers=4, num_heads=4, positions="rotary", norm="rms"
    ),
}
# `zoo_rates.py` found these peak learning rates (record `zoo-rates-cpu`). Among rates that differ
# by factors of two, each gave the lowest held-out loss after 300 steps, as a mean over three seeds.
# Half the rate and twice the rate gave higher losses with each seed.
PEAKS = {"RNN": 4e-3, "LSTM": 3.2e-2, "causal CNN": 3.2e-2, "Transformer": 4e-3}


def build(name: str):
    """Builds the model with this name in `MODELS`."""
    return jf.build(MODELS[name], jf.Execution(layers="unrolled"))


def recipe_of(peak: float) -> OptimizerConfig:
    """Returns the optimizer's settings, which are equal for all models except for the peak rate."""
    return OptimizerConfig(learning_rate=peak, warmup_steps=50, final_fraction=0.0)


def training_batches(ids, seed: int):
    """Yields random batches of the training text without end."""
    return batches(np.random.default_rng(seed), ids, LENGTH, (1, BATCH))


def train(name, ids, held_out, steps: int, seed: int) -> dict:
    """Returns a curve of (step, seconds, held-out loss), and training and decoding speeds."""
    model, recipe = build(name), recipe_of(PEAKS[name])
    optimizer = make_optimizer(recipe)
    start = jax.jit(lambda: init_state(model, optimizer, seed))()
    data = training_batches(ids, seed)
    # The step is compiled in advance, because compilation must not count as training time.
    update = make_step(model, optimizer).lower(start, next(data), np.float32(0)).compile()
    loss_of = jax.jit(partial(loss, model))
    curve, seconds = [], 0.0

    def look(step, params):
        score = float(loss_of(params, held_out))
        curve.append((step, seconds, score))
        print(f"{name:12} step {step:5}: {score:.3f} nats, {seconds:.0f} s", flush=True)

    look(0, start.params)
    begin = time.perf_counter()
    rates = Schedule(recipe, steps).rates()
    for step, (state, last) in enumerate(updates(update, start, data, rates), 1):
        last.loss.block_until_ready()
        seconds += time.perf_counter() - begin
        if step % max(1, steps // 20) == 0 or step == steps:
            look(step, state.params)
        begin = time.perf_counter()
    return {
        "peak_learning_rate": recipe.learning_rate,
        "curve": curve,
        "training_tokens_per_second": steps * BATCH * LENGTH / seconds,
        "decoding_tokens_per_second": decode_speed(model, state.params),
    }


POSITIONS = (32, 128, 512, 1024, 2048, 3968)


def decode_speed(model, params, rounds: int = 25) -> dict:
    """Returns tokens per second of decoding, batch size 1, at several positions."""
    ready = jf.pack_weights(model, {"params": params})

    def seconds(position: int) -> float:
        run = greedy_run(model, ready, 1, position, 1 + 2 * STEPS)
        # The first block of tokens is not timed, because it warms the processor's caches.
        return step_seconds(run, time.perf_counter, skip=1)

    times = time_alternately(
        {position: partial(seconds, position) for position in POSITIONS}, rounds
    )
    return {position: STEPS / float(np.median(some)) for position, some in times.items()}


def draw(results: dict, path: Path) -> None:
    """Plots the losses against step and time, and the speeds of training and decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (by_step, by_time), (training, decoding) = figure.subplots(2, 2)
    for name, result in results.items():
        steps, seconds, losses = zip(*result["curve"], strict=True)
        by_step.plot(steps, losses, label=name)
        by_time.plot(seconds, losses, label=name)
        speeds = result["decoding_tokens_per_second"]
        decoding.plot(list(speeds), list(speeds.values()), "o-", label=name)
    speeds = [result["training_tokens_per_second"] for result in results.values()]
    training.bar(list(results), speeds, color=[f"C{i}" for i in range(len(results))])
    by_step.set(xlabel="steps", ylabel="held-out loss (nats per token)", title="loss by step")
    by_time.set(xlabel="seconds of training", ylabel="held-out loss (nats per token)")
    by_time.set_title("loss by time")
    training.set(ylabel="tokens per second", title="training on complete sequences")
    decoding.set(xlabel="position", ylabel="tokens per second", xscale="log")
    decoding.set_title("decoding, one token at a time")
    decoding.set_ylim(bottom=0)
    losses = [loss for result in results.values() for *_, loss in result["curve"][1:]]
    for axes in (by_step, by_time):
        axes.set_ylim(min(losses) - 0.1, max(losses) + 0.1)
    for axes in (by_step, by_time, training, decoding):
        axes.grid(alpha=0.2)
    by_step.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = text_parser(__doc__, 600, 20, "zoo.png")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    tune_cpu_runtime()
    _, ids, held_out, bytes_a_token = read_windows(arguments.text, VOCAB, LENGTH, HELD_OUT)
    results = {}
    for name in arguments.models:
        results[name] = train(name, ids, held_out, arguments.steps, arguments.seed)
        results[name]["parameters"] = jf.parameter_count(MODELS[name])
    conclude(results, arguments.record)
    draw(results, arguments.picture)
    print(f"{arguments.picture}; {bytes_a_token:.2f} bytes per token")


if __name__ == "__main__":
    run(main)
