"""Shows where the time of a training step on a CPU goes, by kind of work.

    python experiments/profile_step.py                         # GPT-2 124M, rows of 256 tokens
    python experiments/profile_step.py --size 10.8m --dtype bfloat16

XLA reports the time of each operation of the step. An operation that waits for a core counts too,
and several run at once, so the sum of all is not the time of the step.
"""

import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench_train import SIZES, decoder_config
from record import Parser, at_least, conclude, run

# The first kind whose pattern occurs in the name and the shape of an operation.
KINDS = {
    "products with weights": r"dot_general.* \w+\[\d+,\d+\]$| dot \w+\[\d+,\d+\]$",
    "products of attention": r"dot_general",
    "layers cut from stacked weights, and gradients stacked": r"/(split|concatenate) ",
    "loss, without its products": r"/while/",
    "clipping and the optimizer": r"^jit\(step\)/\w+ ",
    "attention, without its products": r"\[\d+,\d+,\d+,\d+\]$",
    "norms, activations, biases and residuals": "",
}
_OPERATION = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = (\w+\[[\d,]*\])\S* ([\w\-]+)\(.*op_name="([^"]*)"', re.MULTILINE
)


def kind_of(operation: str, shape: str, name: str) -> str:
    """Returns the kind of an operation, by its name in the program of the model."""
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
    import numpy as np

    from jaxformer import Decoder, Execution
    from jaxformer.runtime import keep_freed_memory
    from jaxformer.training.batch import Batch
    from jaxformer.training.config import OptimizerConfig
    from jaxformer.training.optimizer import make_optimizer
    from jaxformer.training.step import init_state, make_step

    keep_freed_memory()
    size = SIZES[arguments.size]
    model = Decoder(decoder_config(size, arguments.dtype), Execution(layers="unrolled"))
    optimizer = make_optimizer(OptimizerConfig())
    state = jax.jit(lambda: init_state(model, optimizer, 0))()
    shape = (1, size.batch_size, size.length)
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, shape).astype(np.int32)
    batch = Batch(tokens, tokens)
    step = make_step(model, optimizer).lower(state, batch, np.float32(1)).compile()
    for _ in range(3):  # the first updates take longer
        state, _ = step(state, batch, np.float32(1))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begin = time.perf_counter()
            for _ in range(arguments.updates):
                state, _ = step(state, batch, np.float32(1))
            jax.block_until_ready(state)
            whole = (time.perf_counter() - begin) / arguments.updates
        seconds = seconds_of_operations(Path(folder), arguments.updates)
    found = dict.fromkeys(KINDS, 0.0)
    for name, result, operation, label in _OPERATION.findall(step.as_text()):
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
