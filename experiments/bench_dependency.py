"""The dependency matrix of a larger model: seconds and memory, witness by witness.

    python experiments/bench_dependency.py --record dependency-cpu

A decoder of 12 layers, 256 features and 512 positions, from embeddings to hidden states. Taint is
asked of all pairs of positions, the derivative of some outputs and changes of some inputs; what is
found is compared with the rule. A [512, 512, vocab] Jacobian is never held: the memory is that of
the process, before and at its highest.
"""

import resource
import time

import jax
import numpy as np
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.cli.runtime import keep_freed_memory
from jaxformer.models.build import init
from jaxformer.verify import compare, dependency_matrix, rules

WITNESSES = ("taint", "derivative", "change")


def megabytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(function, x, rule, witnesses, sample) -> dict:
    """Seconds, memory, and whether what was found is the rule (of all pairs, or of those asked)."""
    before, begin = megabytes(), time.perf_counter()
    found = dependency_matrix(function, x, witnesses=witnesses, sample=sample)
    seconds = time.perf_counter() - begin
    compared = compare(found, rule)
    return {
        "seconds": round(seconds, 1),
        "memory, MB": {"before": round(before), "highest": round(megabytes())},
        "pairs": found.witnesses,
        "spurious edges": len(compared.spurious),
        "missing edges": len(compared.missing),
        "disagreements": len(found.disagreements),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=at_least(1), default=12)
    parser.add_argument("--length", type=at_least(2), default=512)
    parser.add_argument("--embed-dim", type=at_least(4), default=256)
    parser.add_argument("--sample", type=at_least(1), default=32)
    arguments = parser.parse_args()
    keep_freed_memory()
    config = jf.DecoderConfig(
        vocab_size=2048,
        max_length=arguments.length,
        num_layers=arguments.layers,
        embed_dim=arguments.embed_dim,
        num_heads=4,
    )
    model = jf.build(config)
    variables = init(model, jax.random.key(0))
    random = np.random.default_rng(0)
    x = 0.1 * random.normal(size=(1, arguments.length, arguments.embed_dim)).astype(np.float32)
    segments = np.ones((1, arguments.length), int)
    rule = rules.of(config, segments)

    def hidden(x):
        return model.apply(variables, x, method="hidden_states")

    figures = {"configuration": vars(arguments) | {"parameters": jf.parameter_count(config)}}
    del figures["configuration"]["record"]
    for witnesses in (("taint",), WITNESSES):
        name = " and ".join(witnesses)
        figures[name] = measured(hidden, x, rule, witnesses, arguments.sample)
        print(name, figures[name], flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
