"""Compares training in bfloat16 and float32 on a CPU with bfloat16 instructions: time and losses.

    python experiments/bench_bfloat16.py --record bfloat16-cpu
    python experiments/bench_bfloat16.py --anyway --size 0.8m --steps 50   # on any machine

The script times the training step of `jaxformer train` in both dtypes alternately. Then the script
trains on bytes of Python's standard library, in both dtypes from the same weights with the same
batches, and compares the losses. Even a small rounding difference changes later losses. For
comparison, a third run trains in float32 from weights that were rounded to bfloat16 once. The
relative difference of the bfloat16 losses from the float32 losses must not exceed a limit. The
limit is `ALLOWED` or twice the difference between the two float32 runs, whichever is larger.
"""

import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench_train import SIZES, decoder_config, jaxformer_step
from record import Parser, at_least, conclude, run
from side_by_side import compare, table

# Rounding to bfloat16 has a relative error of at most 2⁻⁸. The loss is a mean over thousands of
# tokens whose errors partly cancel, so its relative error is smaller.
ALLOWED = 2.0**-8
RUNS = ("float32", "float32, weights rounded once", "bfloat16")


def text() -> bytes:
    """Returns the concatenated source of Python's standard library."""
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
        sequences = tokens[starts[..., None] + np.arange(size.length + 1)]
        state, measured = step(state, Batch(sequences[..., :-1], sequences[..., 1:]), rate)
        found.append(float(measured.loss))
        if number % 20 == 19:
            print(f"{name}: step {number + 1} of {steps}, loss {found[-1]:.4f}", flush=True)
    return found


def differences(losses: dict[str, list[float]]) -> dict[str, float]:
    """Returns the largest relative difference of each run's losses from the losses in float32."""
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
    parser.add_argument(
        "--steps",
        type=at_least(0),
        default=200,
        help="number of training steps for the comparison of losses; 0 skips the comparison",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="measure even if the CPU has no bfloat16 instructions"
    )
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
