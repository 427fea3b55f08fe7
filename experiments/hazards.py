"""Measures the slow programs that docs/hazards.md describes, on a CPU.

    python experiments/hazards.py --record hazards-cpu
    python experiments/hazards.py --only products loop --rounds 3

- `products` measures matrix products in bfloat16 and float32, and a product whose operand XLA
  converts to another type first.
- `loop` measures a loop that computes GPT-2's logits from int8 weights, with and without the
  barrier of `Int8Kernel`.
- `faults` measures a training step with and without `jaxformer.tune_cpu_runtime()`.
- `arenas` measures a training step, and decoding from int8 weights, with malloc limited to one
  arena.

Each measurement runs in its own process, because most settings act when a process starts.
"""

import math
from collections.abc import Callable
from functools import partial

from alone import alone, peak_memory
from record import Parser, at_least, conclude, run

from jaxformer.bench.measurement import Rounds

# `bench_train.py` defines this model size. `SHAPE` contains its numbers of tokens, features and
# feed-forward features.
SIZE = "10.8m"
SHAPE = (4096, 384, 1536)

# GPT-2's output projection has these sizes, with a padded vocabulary.
VOCABULARY, FEATURES, TOKENS = 50_304, 768, 32


def seconds_of(call: Callable[[], object], rounds: int) -> float:
    """Returns the median time of a call, after a warm-up call."""
    return Rounds(rounds, math.inf).measure(call).median


def product(formula: str, operands: str, result: str, barrier: bool, rounds: int) -> float:
    """Returns the seconds of an einsum of two matrices of the shape of the feed-forward layer."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxformer.functional.linear.products import product as own
    from jaxformer.runtime import tune_cpu_runtime

    tune_cpu_runtime()
    sizes = dict(zip("bio", SHAPE, strict=True))
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.normal(size=[sizes[i] for i in name]), operands)
        for name in formula.partition("->")[0].split(",")
    )
    plain = partial(jnp.einsum, formula, preferred_element_type=result)
    computed = jax.jit(partial(own, formula, jnp.dtype(result)) if barrier else plain)
    return seconds_of(lambda: computed(x, y), rounds)


def products(rounds: int) -> dict:
    """Measures matrix products in GFLOP/s, and the weight gradient in milliseconds.

    The weight gradient is measured with and without a transposition of its operand in memory.
    """
    flops = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    dtypes = {
        "float32": ("float32", "float32"),
        "bfloat16, float32 result": ("bfloat16", "float32"),
        "bfloat16, bfloat16 result": ("bfloat16", "bfloat16"),
    }
    speeds = {
        name: flops / alone(product, "bi,io->bo", *pair, False, rounds) / 1e9
        for name, pair in dtypes.items()
    }
    gradient = {
        name: 1e3 * alone(product, "bi,bo->io", "bfloat16", "float32", transposed, rounds)
        for name, transposed in (("as it is", False), ("transposed in memory", True))
    }
    return {"GFLOP/s": speeds, "milliseconds of the gradient of weights": gradient}


def int8_step(barrier: bool, rounds: int) -> float:
    """Returns the seconds per step of a loop that computes GPT-2's logits from int8 weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxformer.functional.linear.kernels import Int8Kernel
    from jaxformer.runtime import tune_cpu_runtime

    tune_cpu_runtime()
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-127, 128, (VOCABULARY, FEATURES)), jnp.int8)
    scale, offset = jnp.ones(VOCABULARY), jnp.zeros(VOCABULARY)

    def logits(values, x):
        if barrier:
            return Int8Kernel(values, scale, offset).times(x, jnp.float32)
        return (values * x[0]).sum(axis=-1)[None] * scale

    @jax.jit
    def loop(values, x):
        def step(x, _):
            return x + 1e-6 * logits(values, x)[:, :FEATURES], None

        return jax.lax.scan(step, x, length=TOKENS)[0]

    x = jnp.asarray(rng.normal(size=(1, FEATURES)), jnp.float32)
    return seconds_of(lambda: loop(values, x), rounds) / TOKENS


def loop(rounds: int) -> dict:
    """Measures the milliseconds per step with and without the barrier of `Int8Kernel`."""
    named = (("with the barrier", True), ("without the barrier", False))
    return {name: 1e3 * alone(int8_step, barrier, rounds) for name, barrier in named}


def training(keep: bool, rounds: int) -> dict:
    """Measures the time, the page faults and the peak memory of a training step."""
    import resource

    from bench_train import SIZES, jaxformer_step

    from jaxformer.runtime import tune_cpu_runtime

    if keep:
        tune_cpu_runtime()
    step = jaxformer_step(SIZES[SIZE], "float32", "auto", "none")
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = seconds_of(step, rounds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "faults": (used.ru_minflt - before) / (rounds + 1),
        "peak_gigabytes": peak_memory() / 1e9,
    }


def decoding(rounds: int) -> float:
    """Measures the seconds of decoding from int8 weights."""
    from bench_decode import jaxformer_decoding

    from jaxformer.runtime import tune_cpu_runtime

    tune_cpu_runtime()
    return seconds_of(jaxformer_decoding("gpt2-124m", 1, "float32", int8=True), rounds)


def faults(rounds: int) -> dict:
    """Measures a training step with and without `tune_cpu_runtime`."""
    named = (("freed memory kept", True), ("default", False))
    return {name: alone(training, keep, rounds) for name, keep in named}


def arenas(rounds: int) -> dict:
    """Measures a training step and decoding with different numbers of malloc arenas."""
    environments = {"default": {}, "one arena": {"MALLOC_ARENA_MAX": "1"}}
    return {
        name: {
            "training": alone(training, True, rounds, environment=environment),
            "decoding_seconds": alone(decoding, rounds, environment=environment),
        }
        for name, environment in environments.items()
    }


MEASUREMENTS = {"products": products, "loop": loop, "faults": faults, "arenas": arenas}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--rounds", type=at_least(1), default=7)
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.only:
        figures[name] = MEASUREMENTS[name](arguments.rounds)
        print(f"{name}: {figures[name]}", flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
