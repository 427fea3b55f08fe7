"""Measures the memory and the time of one call on many rows, which is computed in batches.

    python experiments/bench_rows.py --record rows-cpu

Each measurement is a process of its own: it loads the model, notes the peak of its memory so far
and makes the call. The figure is by how much the call raises the peak. In measurements `at_once`,
`batch_size` is the number of rows, so that all of them are one batch.
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
LONGEST, NEW = 64, 16  # tokens of the longest prompt, and new tokens
MASK = 3
SEED = 0


def measure(call: str, rows: int, batch_size: int | None) -> dict[str, float]:
    """Returns the seconds of a call and the MB by which it raises the peak of memory."""
    is_encoder = call == "fill"
    model = jf.build((jf.EncoderConfig if is_encoder else jf.DecoderConfig)(**SIZE))
    variables = jax.jit(model.init)(jax.random.key(SEED), np.zeros((1, 8), np.int32))
    random = np.random.default_rng(SEED)
    texts = [random.integers(1, 8192, random.integers(1, LONGEST + 1)) for _ in range(rows)]
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
        table = random.integers(1, 8192, (rows, LONGEST))
        jax.block_until_ready(jf.score(model, variables, table, batch_size=batch_size))
    else:
        for text in texts:
            text[0] = MASK
        fill(model, variables, texts, MASK, batch_size=batch_size)
    return {"seconds": time.perf_counter() - begin, "mb": (peak_memory() - before) / 1e6}


def in_a_process(call: str, rows: int, batch_size: int | None) -> dict[str, float | str]:
    """Returns the result of `measure` in a new process, or the error that ended it."""
    try:
        return alone(measure, call, rows, batch_size)
    except Exception as error:  # such as no memory, which may end the process
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[500, 5_000])
    parser.add_argument("--at-once", type=at_least(1), default=500, help="rows of one batch")
    parser.add_argument("--call", choices=CALLS, help="make one call in this process")
    parser.add_argument("--batch-size", type=at_least(1))
    arguments = parser.parse_args()
    if arguments.call:
        found = measure(arguments.call, arguments.rows[0], arguments.batch_size)
        print(json.dumps(found))
        return
    figures = []
    for call in CALLS:
        cases = [(rows, None) for rows in arguments.rows]
        for rows, batch_size in [*cases, (arguments.at_once, arguments.at_once)]:
            found = in_a_process(call, rows, batch_size)
            figures.append({"call": call, "rows": rows, "at_once": batch_size is not None, **found})
            print(figures[-1], flush=True)
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
