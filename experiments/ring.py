"""Measures decoding with a sliding window in a ring cache: time per token and accuracy.

    python experiments/ring.py                            # 4,000 tokens, window 32
    python experiments/ring.py --tokens 8000 --window 128 --record ring-cpu

A model of 6 layers × 384 features with rotary positions reads a random text token by token, with
one compiled step. The model decodes with a ring buffer of window + 8 slots and, for comparison,
with a cache of one slot per token. For each cache, the script compares the logits of decoding with
the logits of one forward pass over the whole text.
"""

import statistics
from functools import partial

from record import Parser, at_least, conclude, run

from jaxformer.bench.measurement import Rounds, time_alternately

# The script times decoding in `STRETCHES` segments of the text. Each segment has `STEPS` tokens.
STRETCHES, STEPS = 6, 20


def decoding(num_tokens: int, window: int, rounds: int) -> dict:
    """Measures seconds per token at several positions for both caches, and logit differences."""
    import jax
    import numpy as np

    import jaxformer as jf

    jf.tune_cpu_runtime()
    config = jf.DecoderConfig(
        1000, num_tokens, 6, 384, 6, positions="rotary", norm="rms", window=window
    )
    model = jf.Decoder(config)
    tokens = np.random.default_rng(0).integers(0, 1000, (1, num_tokens)).astype(np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :1])
    step = jax.jit(lambda variables, token, cache: jf.extend(model, variables, token, cache))
    marks = np.linspace(0, num_tokens - STEPS, STRETCHES, dtype=int)
    caches, found = {}, {}
    for name, slots in (("ring", window + 8), ("all slots", num_tokens)):
        cache, logits_of_steps = jf.init_cache(model, variables, 1, slots, ring=name == "ring"), []
        for position, token in enumerate(tokens[0]):
            if position in marks:
                caches[name, position] = cache
            logits, cache = step(variables, token[None, None], cache)
            logits_of_steps.append(logits[0, 0])
        found[name] = np.stack(logits_of_steps)

    def read(position: int, cache):
        for token in tokens[0, position : position + STEPS]:
            logits, cache = step(variables, token[None, None], cache)
        return logits

    timers = {
        key: partial(Rounds().time, partial(read, key[1], cache)) for key, cache in caches.items()
    }
    times = time_alternately(timers, rounds)
    seconds = {
        name: {int(at): statistics.median(times[name, at]) / STEPS for at in marks}
        for name in found
    }
    whole = np.asarray(jax.jit(model.apply)(variables, tokens)[0])
    return {
        "window": window,
        "tokens": num_tokens,
        "seconds_per_token": seconds,
        "difference": {name: float(abs(x - whole).max()) for name, x in found.items()},
        "logits_std": float(whole.std()),
    }


def main():
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=at_least(STRETCHES * STEPS), default=4000)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--window", type=at_least(1), default=32)
    arguments = parser.parse_args()
    figures = decoding(arguments.tokens, arguments.window, arguments.rounds)
    print("milliseconds per token, by number of previous tokens:")
    for name, seconds in figures["seconds_per_token"].items():
        shown = " ".join(f"{at}: {1e3 * x:.2f} " for at, x in seconds.items())
        difference = figures["difference"][name]
        print(f"  {name:10} {shown}   logits differ by at most {difference:.1e}")
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
