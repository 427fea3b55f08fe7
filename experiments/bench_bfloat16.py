"""Compares bfloat16 with float32 on a CPU with instructions for bfloat16: time of a step, losses.

    python experiments/bench_bfloat16.py --record bfloat16-cpu
    python experiments/bench_bfloat16.py --anyway --size 0.8m --steps 50   # on any machine

It times the step of `jaxformer train` in both dtypes in turn. Then it trains on bytes of Python's
standard library, in both dtypes from the same weights with the same batches, and compares the
losses. Any rounding changes later losses. A third run shows how much: it is float32, and begins
with weights that are rounded to bfloat16 once. The losses of bfloat16 may differ from those of
float32 by `ALLOWED`, relative to the loss, or by twice as much as those of the third run.
"""

import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench_train import SIZES, decoder_config, jaxformer_step
from record import Parser, at_least, conclude, run
from side_by_side import compare, table

# bfloat16 rounds each number by a factor of at most 1 ± 2⁻⁸. The loss is a mean over thousands of
# tokens, whose errors are of both signs, so that it is closer than a single number.
ALLOWED = 2.0**-8
RUNS = ("float32", "float32, weights rounded once", "bfloat16")


def text() -> bytes:
    """Returns the modules of Python's standard library, one after another."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def losses(size, name: str, steps: int) -> list[float]:
    """Trains a model from seed 0. Returns the loss of each step."""
    import jax
    import numpy as np

    from jaxformer import Decoder
    from jaxformer.training.batch import Batch
    from jaxformer.training.config import OptimizerConfig
    from jaxformer.training.optimizer import Schedule, make_optimizer
    from jaxformer.training.step import init_state, make_step

    dtype = "bfloat16" if name == "bfloat16" else "float32"
    config = decoder_config(replace(size, vocab_size=256), dtype)
    settings = OptimizerConfig()
    model, optimizer = Decoder(config), make_optimizer(settings)
    state = jax.jit(lambda: init_state(model, optimizer, 0))()
    if name.endswith("once"):
        rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype(x.dtype), state.params)
        state = state._replace(params=rounded)
    step, found = make_step(model, optimizer), []
    tokens, rng = np.frombuffer(text(), np.uint8).astype(np.int32), np.random.default_rng(0)
    for number, rate in enumerate(Schedule(settings, steps).rates()):
        starts = rng.integers(0, len(tokens) - size.length - 1, (1, size.batch_size))
        rows = tokens[starts[..., None] + np.arange(size.length + 1)]
        state, measured = step(state, Batch(rows[..., :-1], rows[..., 1:]), rate)
        found.append(float(measured.loss))
        if number % 20 == 19:
            print(f"{name}: step {number + 1} of {steps}, loss {found[-1]:.4f}", flush=True)
    return found


def differences(losses: dict[str, list[float]]) -> dict[str, float]:
    """Returns the largest relative difference from the losses in float32."""
    exact = losses["float32"]
    return {
        name: max(abs(a - b) / b for a, b in zip(found, exact, strict=True))
        for name, found in losses.items()
        if name != "float32"
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="10.8m")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--steps", type=at_least(0), default=200, help="0: compare no losses")
    parser.add_argument("--anyway", action="store_true", help="measure on any CPU")
    arguments = parser.parse_args()
    from jaxformer.functional.machine import multiplies_bfloat16

    if not multiplies_bfloat16() and not arguments.anyway:
        print("skipped: this CPU has neither AMX nor AMD's AVX-512 BF16 (/proc/cpuinfo)")
        return
    size = SIZES[arguments.size]
    makers = {
        dtype: partial(jaxformer_step, size, dtype, "auto", "none")
        for dtype in ("bfloat16", "float32")
    }
    subjects = compare(makers, arguments.rounds)
    figures = {"size": arguments.size, "multiplies bfloat16": multiplies_bfloat16()}
    figures |= table(subjects, size.batch_size * size.length)
    if arguments.steps:
        found = {name: losses(size, name, arguments.steps) for name in RUNS}
        largest = differences(found)
        figures["largest relative differences of losses"] = largest
        figures["allowed"] = max(ALLOWED, 2 * largest[RUNS[1]])
        figures["losses"] = {name: [round(x, 5) for x in found[name]] for name in RUNS}
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
