"""Measures when a patching sweep gains by recomputing only the values after each patch site.

    python experiments/bench_short_cut.py
    python experiments/bench_short_cut.py --models 4x128 --length 48 --heads

A sweep patches every layer and position and, with --heads, every head. Its runs are whole forward
passes, or they start at one of 1, 2, 4 or 8 positions and recompute only the values after the patch
site. Each start position needs a compiled program. Every sweep runs in a new process without stored
programs, so its time includes the compilations. Each round runs all variants once. The script
prints the shortest times and marks the variant that `patch_sweep` chooses.

Result of one round on two idle cores of a Xeon (results/short-cut-cpu.json): `patch_sweep` chooses
the fastest of the five variants for each of the three models. With 4 layers of 128 features, whole
passes take 2.6 s, and passes from 8 positions take 11.4 s. With 12 layers of 768 features, whole
passes take 31.8 s, and passes from 2 positions take 13.5 s. With 8 instead of 4 start positions,
each additional position takes 1.2 to 1.7 s, mostly for compilation.
"""

import argparse
import time
from functools import partial
from unittest import mock

import jax
import numpy as np
from alone import alone
from record import Parser, at_least, conclude, run

VOCAB, STARTS = 512, (0, 1, 2, 4, 8)


def model_size(text: str) -> tuple[int, int]:
    """Parses LAYERSxDIM. The number of features must be a multiple of 64, the size of a head."""
    layers, dim = map(int, text.split("x"))
    if layers < 1 or dim < 64 or dim % 64:
        raise argparse.ArgumentTypeError(f"{text}: DIM must be a multiple of 64")
    return layers, dim


def build(layers: int, dim: int, length: int):
    """Returns a decoder with heads of 64 features."""
    import jaxformer as jf

    sizes = {"num_layers": layers, "embed_dim": dim, "num_heads": dim // 64}
    return jf.Decoder(jf.DecoderConfig(vocab_size=VOCAB, max_length=length, **sizes))


def axes_of(has_heads: bool) -> tuple[str, ...]:
    """Returns the axes along which the patch sites differ."""
    return ("layer", "head", "position") if has_heads else ("layer", "position")


def sweep_seconds(starts: int, sizes: tuple[int, int, int], has_heads: bool) -> dict[str, float]:
    """Runs one sweep and returns the seconds of the sweep and of its compilations.

    Args:
        starts: The number of start positions, or 0 for whole passes.
        sizes: The numbers of layers, features and tokens.
        has_heads: Whether heads are patched separately.
    """
    import jaxformer as jf
    from jaxformer.interpret import LogitDifference, patch_sweep, sweep
    from jaxformer.models.parameters import init

    jf.tune_cpu_runtime()
    model = build(*sizes)
    variables = init(model, jax.random.key(0))
    texts = np.random.default_rng(0).integers(0, VOCAB, (2, 1, sizes[-1]), np.int32)
    compilations = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    begin = time.perf_counter()
    with mock.patch.object(sweep, "choose_starts", return_value=starts):
        patch_sweep(model, variables, *texts, LogitDifference(1, 2), axes=axes_of(has_heads))
    return {"seconds": time.perf_counter() - begin, "compilation": sum(compilations)}


def choice(sizes: tuple[int, int, int], has_heads: bool) -> int:
    """Returns the number of start positions that `patch_sweep` chooses."""
    from jaxformer.interpret.patching import Grid
    from jaxformer.interpret.sweep import choose_starts

    model, (layers, dim, length) = build(*sizes), sizes
    shape = (layers, 1, dim // 64, length, 64)
    grid = Grid("attention.heads", axes_of(has_heads), shape, True, True)
    return choose_starts(model, grid, length, 1)


def measure(sizes: tuple[int, int, int], has_heads: bool, rounds: int) -> dict:
    """Measures all variants of the sweep of one model, prints a table and returns the figures."""
    chosen = choice(sizes, has_heads)
    print("{} layers, {} features, {} tokens".format(*sizes), flush=True)
    found = {starts: [] for starts in STARTS}
    for _ in range(rounds):
        for starts, times in found.items():
            times.append(alone(partial(sweep_seconds, starts, sizes, has_heads)))
    fastest = {starts: min(times, key=lambda x: x["seconds"]) for starts, times in found.items()}
    for starts, times in fastest.items():
        name = f"{starts} start position{'s' * (starts > 1)}" if starts else "whole passes"
        print(
            f"  {name:18} {times['seconds']:7.1f} s, of which compilation takes "
            f"{times['compilation']:5.1f} s{'  (chosen)' if starts == chosen else ''}",
            flush=True,
        )
    least = min(times["seconds"] for times in fastest.values())
    ratio = fastest[chosen]["seconds"] / least
    print(f"  The chosen variant takes {ratio:.2f} times as long as the fastest one.")
    return {"sizes": sizes, "chosen": chosen, "ratio": ratio, "times": found}


def main():
    parser = Parser(__doc__)
    models = [(4, 128), (12, 256), (12, 768)]
    parser.add_argument("--models", type=model_size, nargs="+", default=models)
    parser.add_argument("--length", type=at_least(2), default=48)
    parser.add_argument("--heads", action="store_true", help="patch each head separately")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    arguments = parser.parse_args()
    figures = [
        measure((*sizes, arguments.length), arguments.heads, arguments.rounds)
        for sizes in arguments.models
    ]
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
