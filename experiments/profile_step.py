"""Shows how the time of a training step on a CPU is divided between kinds of operations.

    python experiments/profile_step.py                         # GPT-2 124M, sequences of 256 tokens
    python experiments/profile_step.py --size 10.8m --dtype bfloat16

XLA reports the time of each operation of the step. The time of an operation includes waiting for a
core, and operations overlap. The sum over all operations is therefore not the time of the step.
"""

import math
import re
import tempfile
from collections import defaultdict
from pathlib import Path

from bench_train import SIZES, jaxformer_step
from record import Parser, at_least, conclude, run

# The first pattern that matches the name and shape of an operation determines its kind.
KINDS = {
    "products with weights": r"dot_general.* \w+\[\d+,\d+\]$| dot \w+\[\d+,\d+\]$",
    "products of attention": r"dot_general",
    "slicing of stacked weights and stacking of gradients": r"/(split|concatenate) ",
    "loss, without matrix products": r"/while/",
    "clipping and the optimizer": r"^jit\(step\)/\w+ ",
    "attention, without matrix products": r"\[\d+,\d+,\d+,\d+\]$",
    "norms, activations, biases and residuals": "",
}
_OPERATION = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = (\w+\[[\d,]*\])\S* ([\w\-]+)\(.*op_name="([^"]*)"', re.MULTILINE
)


def kind_of(operation: str, shape: str, name: str) -> str:
    """Returns the kind of an operation, determined by its name in the compiled program."""
    text = f"{name} {operation} {shape}"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, text))


def seconds_of_operations(folder: Path, updates: int) -> dict[str, float]:
    """Returns the seconds per update of each operation in a trace."""
    from jax.profiler import ProfileData

    (file,) = folder.glob("**/*.xplane.pb")
    seconds = defaultdict(float)
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                seconds[event.name] += event.duration_ns / 1e9 / updates
    return seconds


def main():
    parser = Parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="124m/256")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--updates", type=at_least(1), default=3)
    arguments = parser.parse_args()
    import jax

    from jaxformer.bench.measurement import Rounds
    from jaxformer.runtime import tune_cpu_runtime

    tune_cpu_runtime()
    size, rounds = SIZES[arguments.size], Rounds(arguments.updates, math.inf)
    step = jaxformer_step(size, arguments.dtype, "unrolled", "none")
    rounds.measure(step)  # These updates warm up the program.
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            whole = rounds.measure(step, warmup=0).median
        seconds = seconds_of_operations(Path(folder), arguments.updates)
    text = step.step.lower(step.state, step.batch).compile().as_text()
    found = dict.fromkeys(KINDS, 0.0)
    for name, result, operation, label in _OPERATION.findall(text):
        found[kind_of(operation, result, label)] += seconds.get(name, 0.0)
    print(f"{arguments.size}, {arguments.dtype}: {size}\n{1e3 * whole:8,.0f} ms  a step")
    for kind, total in found.items():
        print(f"{1e3 * total:8,.0f} ms  {kind}")
    conclude(
        {"size": arguments.size, "dtype": arguments.dtype, "step": whole, "kinds": found},
        arguments.record,
    )


if __name__ == "__main__":
    run(main)
