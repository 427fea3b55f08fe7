"""Measures the time per generated token with and without a key/value cache.

    python experiments/cached.py --picture cached.png

After t tokens, a step with the cache takes O(t), because it reads all keys and values. Without the
cache, a step is a forward pass over the whole sequence and takes O(t²) (lecture 13 §7). Generating
T tokens takes O(T²) with the cache and O(T³) without the cache.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run

import jaxformer as jf
from jaxformer.bench.measurement import Rounds, time_alternately
from jaxformer.bench.models import greedy_run, step_seconds
from jaxformer.decoding.steps import STEPS
from jaxformer.models.parameters import init
from jaxformer.runtime import tune_cpu_runtime

POSITIONS = (64, 128, 256, 512, 1024, 2048, 4096)
CONFIG = jf.DecoderConfig(
    vocab_size=1024, max_length=8192, num_layers=4, embed_dim=256, num_heads=4, positions="rotary"
)


def with_cache(model, variables, position: int) -> Callable[[], float]:
    """Returns a function that times decoding with a cache after `position` tokens."""
    run = greedy_run(model, jf.pack_weights(model, variables), 1, position, 1 + STEPS)
    return lambda: step_seconds(run, time.perf_counter) / STEPS


def without_cache(model, variables, position: int) -> Callable[[], float]:
    """Returns a function that times a forward pass over `position` + 1 tokens."""
    tokens = jnp.ones((1, position + 1), jnp.int32)

    @jax.jit
    def next_token(variables, tokens):
        hidden = model.apply(variables, tokens, method="hidden_states")[:, -1]
        return (hidden @ model.apply(variables, method="head")["kernel"]).argmax()

    return lambda: Rounds().time(lambda: next_token(variables, tokens))


WAYS = {"with the cache": with_cache, "without": without_cache}


def draw(seconds: dict, path: Path) -> None:
    """Plots the time per token and the time of a whole text against the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, by_position in seconds.items():
        positions, times = np.array(list(by_position)), np.array(list(by_position.values()))
        left.plot(positions, 1000 * times, "o-", label=name)
        whole = np.interp(np.arange(positions[-1]), positions, times).cumsum()
        right.plot(whole, label=name)
    left.set(ylabel="milliseconds per token", title="a token", xscale="log", yscale="log")
    right.set(ylabel="seconds for the whole text", title="a text", yscale="log")
    for axes in (left, right):
        axes.set_xlabel("tokens in the cache")
        axes.grid(alpha=0.2)
        axes.legend()
    right.set_xlabel("tokens in the text")
    figure.savefig(path, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--picture", type=picture, default="cached.png")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    model = jf.build(CONFIG, jf.Execution(layers="unrolled"))
    variables = init(model, jax.random.key(0))
    decoders = {
        (name, position): make(model, variables, position)
        for name, make in WAYS.items()
        for position in POSITIONS
    }
    times = time_alternately(decoders, arguments.rounds)
    seconds = {
        name: {position: statistics.median(times[name, position]) for position in POSITIONS}
        for name in WAYS
    }
    for position in POSITIONS:
        shown = ", ".join(f"{name} {1000 * s[position]:.2f} ms" for name, s in seconds.items())
        print(f"{position:5} previous tokens: {shown}", flush=True)
    conclude({"seconds a token": seconds}, arguments.record)
    draw(seconds, arguments.picture)


if __name__ == "__main__":
    run(main)
