"""Measures time and memory of `dependency_matrix` for a larger model, by method.

    python experiments/bench_dependency.py --record dependency-cpu

The model is a decoder with 12 layers, 256 features and 512 positions, from embeddings to hidden
states. The first run finds all dependencies between positions by taint analysis, which propagates
dependencies through the program. The second run, in a separate process, also tests a sample of the
pairs of positions by derivatives and by perturbations. Each run compares the found dependencies
with the dependencies that `jaxformer.verify` expects for the config. The full [512, 512, vocab]
Jacobian is never stored. Memory is reported after the first forward pass and at the peak.
"""

import time

import jax
import numpy as np
from alone import alone, peak_memory
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.verify import compare, dependency_matrix, rules

WITNESSES = ("taint", "derivative", "change")


def measured(witnesses, arguments) -> dict:
    """Measures seconds, memory, and the differences between found and expected dependencies."""
    tune_cpu_runtime()
    config = config_of(arguments)
    model = jf.build(config)
    variables = init(model, jax.random.key(0))
    shape = (1, arguments.length, arguments.embed_dim)
    x = np.float32(0.1 * np.random.default_rng(0).normal(size=shape))

    def hidden(x):
        return model.apply(variables, x, method="hidden_states")

    jax.block_until_ready(jax.jit(hidden)(x))
    before, begin = peak_memory(), time.perf_counter()
    found = dependency_matrix(hidden, x, witnesses=witnesses, sample=arguments.sample)
    seconds = time.perf_counter() - begin
    compared = compare(found, rules.model_rule(config, np.ones(shape[:2], int)))
    return {
        "seconds": round(seconds, 1),
        "memory, MB": {"before": before >> 20, "highest": peak_memory() >> 20},
        "pairs": found.witnesses,
        "spurious edges": len(compared.spurious),
        "missing edges": len(compared.missing),
        "disagreements": len(found.disagreements),
    }


def config_of(arguments):
    return jf.DecoderConfig(
        vocab_size=2048,
        max_length=arguments.length,
        num_layers=arguments.layers,
        embed_dim=arguments.embed_dim,
        num_heads=4,
    )


def main():
    parser = Parser(__doc__)
    parser.add_argument("--scan-layers", type=at_least(1), default=12)
    parser.add_argument("--length", type=at_least(2), default=512)
    parser.add_argument("--embed-dim", type=at_least(4), default=256)
    parser.add_argument("--sample", type=at_least(1), default=32)
    arguments = parser.parse_args()
    figures = {name: value for name, value in vars(arguments).items() if name != "record"}
    figures["parameters"] = jf.parameter_count(config_of(arguments))
    for witnesses in (("taint",), WITNESSES):
        name = " and ".join(witnesses)
        figures[name] = alone(measured, witnesses, arguments)
        print(name, figures[name], flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
