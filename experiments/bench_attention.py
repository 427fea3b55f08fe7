"""Measures blockwise attention: memory for long sequences, and time compared with another commit.

    python experiments/bench_attention.py --record attention-memory-cpu
    python experiments/bench_attention.py --before ../before --record attention-time-cpu

Memory (default): the script computes the output and the gradients of causal attention over one
sequence, with one head of 64 float32 features. For each length, a separate process reports:

- the increase of its peak memory while the program runs,
- the temporary memory of the compiled program (without inputs and outputs),
- the compilation time, and the time of the faster of two runs, in seconds.

Time (--before FOLDER): FOLDER is another checkout of this repository, for example made by
`git worktree add FOLDER COMMIT`. The other checkout and this checkout run alternately for many
rounds, with the forward pass only and with gradients. A ratio is the time of the other checkout
divided by the time of this checkout in the same round. This checkout also runs in a second process.
The ratio of the times of the two processes shows the noise of the machine.
"""

import argparse
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from alone import alone, peak_memory
from record import Parser, at_least, conclude, run
from side_by_side import compare

from jaxformer.bench.measurement import Rounds

LENGTHS = (8192, 16384, 32768)
SHAPES = ((16, 6, 256, 64), (2, 12, 256, 64), (1, 12, 1024, 64), (1, 12, 2048, 64))
PASSES = ("forward", "forward and backward")


def attention(gradients: bool):
    """Compiles attention with the inputs (query, key, value, cotangent).

    The result is the output, or (output, gradients) if `gradients` is True.
    """
    import jax

    from jaxformer.functional import Causal, dot_product_attention

    def forward(query, key, value):
        return dot_product_attention(query, key, value, Causal(), implementation="blockwise")

    def both(query, key, value, cotangent):
        output, pull_back = jax.vjp(forward, query, key, value)
        return output, pull_back(cotangent)

    return jax.jit(both if gradients else lambda *inputs: forward(*inputs[:3]))


def inputs(shape):
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    return [jax.device_put(rng.standard_normal(shape, np.float32)) for _ in range(4)]


def memory(length: int) -> dict:
    """Measures the memory and time of attention with gradients over `length` tokens."""
    import jax

    given = jax.block_until_ready(inputs((1, 1, length, 64)))
    begin = time.perf_counter()
    program = attention(gradients=True).lower(*given).compile()
    compilation, before = time.perf_counter() - begin, peak_memory()
    timing = Rounds(2, math.inf).measure(lambda: program(*given), warmup=0)
    analysis = program.memory_analysis()
    return {
        "length": length,
        "megabytes above those before": round((peak_memory() - before) / 2**20, 1),
        "of outputs": round(analysis.output_size_in_bytes / 2**20, 1),
        "temporary memory reported by the compiler": round(analysis.temp_size_in_bytes / 2**20, 1),
        "scores of the whole sequence would be": length**2 * 4 / 2**20,
        "seconds to compile": round(compilation, 2),
        "seconds": round(timing.least, 2),
    }


def subject(folder: Path | None, shape, gradients: bool):
    """Returns a function that runs attention once with the package in `folder`.

    If `folder` is None, the function uses the package of this checkout.
    """
    if folder is not None:
        for name in [name for name in sys.modules if name.split(".")[0] == "jaxformer"]:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
    import jax

    given, program = inputs(shape), attention(gradients)
    return lambda: jax.block_until_ready(program(*given))


def timed(before: Path, shape, gradients: bool, rounds: int) -> dict:
    """Times this version, the version in `before`, and this version again, in alternating rounds.

    Returns the milliseconds and the ratios of all rounds.
    """
    folders = {"now": None, "before": before, "now, again": None}
    subjects = compare(
        {name: partial(subject, folder, shape, gradients) for name, folder in folders.items()},
        rounds,
    )
    now, *others = subjects.values()
    figures = {"shape": shape, "passes": PASSES[gradients]}
    for one in subjects.values():
        times = {"median": one.median, "least": min(one.seconds)}
        figures[f"{one.name}, ms"] = {how: round(1e3 * time, 2) for how, time in times.items()}
    for other in others:
        ratios = [b / a for a, b in zip(now.seconds, other.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[f"{other.name} / now"] = {
            "median": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "of the least": round(min(other.seconds) / min(now.seconds), 3),
        }
    return figures


def checkout(text: str) -> Path:
    """Parses the path of another checkout of this repository."""
    folder = Path(text).resolve()
    if not (folder / "jaxformer").is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; it must be a folder with another checkout of jaxformer"
        )
    return folder


def main():
    parser = Parser(__doc__)
    parser.add_argument(
        "--before",
        type=checkout,
        help="folder of another checkout, whose times are compared with the times of this checkout",
    )
    parser.add_argument("--rounds", type=at_least(2), default=100)
    parser.add_argument("--lengths", type=at_least(1), nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    figures = []
    if arguments.before is None:
        for length in arguments.lengths:
            figures.append(alone(memory, length))
            print(figures[-1], flush=True)
    else:
        for shape in SHAPES:
            for gradients in (False, True):
                figures.append(timed(arguments.before, shape, gradients, arguments.rounds))
                print(figures[-1], flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
