"""Measures the memory and the time of one call on many sequences, which it splits into batches.

    python experiments/bench_sequences.py --record sequences-cpu

Each measurement runs in a separate process, which loads the model, reads its peak memory and makes
the call. The measured memory is the difference between the peak after the call and the peak before
it. In the measurements `at_once`, `batch_size` is the number of sequences, so that there is only
one batch.
"""

import json
import time

import jax
import numpy as np
from alone import alone, peak_memory
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.decoding.fill import fill

SIZE = {"vocab_size": 8192, "max_length": 256, "num_layers": 4, "embed_dim": 256, "num_heads": 4}
CALLS = ("generate", "beam_search", "score", "fill")
# The longest prompt has `LONGEST` tokens. `generate` and `beam_search` add `NEW` tokens to each
# prompt.
LONGEST, NEW = 64, 16
MASK = 3
SEED = 0


def measure(call: str, num_sequences: int, batch_size: int | None) -> dict[str, float]:
    """Returns the seconds of a call, and the increase of peak memory in MB."""
    is_encoder = call == "fill"
    model = jf.build((jf.EncoderConfig if is_encoder else jf.DecoderConfig)(**SIZE))
    variables = jax.jit(model.init)(jax.random.key(SEED), np.zeros((1, 8), np.int32))
    random = np.random.default_rng(SEED)
    texts = [
        random.integers(1, 8192, random.integers(1, LONGEST + 1)) for _ in range(num_sequences)
    ]
    before, begin = peak_memory(), time.perf_counter()
    if call == "generate":
        jf.generate(
            model,
            variables,
            texts,
            max_new_tokens=NEW,
            sampler=jf.Sampler(temperature=0.0),
            batch_size=batch_size,
        )
    elif call == "beam_search":
        jf.beam_search(
            model, variables, texts, max_new_tokens=NEW, beam_width=4, batch_size=batch_size
        )
    elif call == "score":
        table = random.integers(1, 8192, (num_sequences, LONGEST))
        jax.block_until_ready(jf.score(model, variables, table, batch_size=batch_size))
    else:
        for text in texts:
            text[0] = MASK
        fill(model, variables, texts, MASK, batch_size=batch_size)
    return {"seconds": time.perf_counter() - begin, "mb": (peak_memory() - before) / 1e6}


def in_a_process(call: str, num_sequences: int, batch_size: int | None) -> dict[str, float | str]:
    """Returns the result of `measure` in a new process, or the error that ended the process."""
    try:
        return alone(measure, call, num_sequences, batch_size)
    except Exception as error:  # The process may run out of memory.
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--num-sequences", type=at_least(1), nargs="+", default=[500, 5_000])
    parser.add_argument(
        "--at-once", type=at_least(1), default=500, help="number of sequences per batch"
    )
    parser.add_argument("--call", choices=CALLS, help="measure only this function, in this process")
    parser.add_argument("--batch-size", type=at_least(1))
    arguments = parser.parse_args()
    if arguments.call:
        found = measure(arguments.call, arguments.num_sequences[0], arguments.batch_size)
        print(json.dumps(found))
        return
    figures = []
    for call in CALLS:
        cases = [(num_sequences, None) for num_sequences in arguments.num_sequences]
        for num_sequences, batch_size in [*cases, (arguments.at_once, arguments.at_once)]:
            found = in_a_process(call, num_sequences, batch_size)
            figures.append(
                {
                    "call": call,
                    "num_sequences": num_sequences,
                    "at_once": batch_size is not None,
                    **found,
                }
            )
            print(figures[-1], flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
