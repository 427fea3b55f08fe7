"""Decoding with a sliding window in a ring of slots: is a token's time flat, and is it one pass?

    python experiments/ring.py                            # 4,000 tokens, window 32
    python experiments/ring.py --tokens 8000 --window 128 --record ring-cpu

A model of 6 layers × 384 with rotary positions reads a random text token by token, by one compiled
step over a cache of window + 8 slots, and over one of as many slots as there are tokens; the logits
of the ring are held against one pass over the whole text.
"""

import statistics
import time

from record import Parser, at_least, conclude, run

STRETCHES = 8


def decoding(num_tokens: int, window: int) -> dict:
    """Seconds a token, stretch by stretch, of either cache; the largest difference of logits."""
    import jax
    import numpy as np

    import jaxformer as jf

    jf.keep_freed_memory()
    config = jf.DecoderConfig(
        1000, num_tokens, 6, 384, 6, positions="rotary", norm="rms", window=window
    )
    model = jf.Decoder(config)
    tokens = np.random.default_rng(0).integers(0, 1000, (1, num_tokens)).astype(np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :1])
    step = jax.jit(lambda variables, token, cache: jf.advance(model, variables, token, cache))
    seconds, found = {}, {}
    for name, slots in (("ring", window + 8), ("all slots", num_tokens)):
        cache = jf.start(model, variables, 1, slots, ring=name == "ring")
        times, rows = [], []
        for token in tokens[0]:
            begin = time.perf_counter()
            logits, cache = step(variables, token[None, None], cache)
            logits.block_until_ready()
            times.append(time.perf_counter() - begin)
            rows.append(logits[:, 0])
        stretches = np.array_split(times, STRETCHES)
        seconds[name] = [statistics.median(stretch) for stretch in stretches]
        found[name] = np.stack([np.asarray(row[0]) for row in rows])
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
    parser.add_argument("--tokens", type=at_least(STRETCHES * 10), default=4000)
    parser.add_argument("--window", type=at_least(1), default=32)
    arguments = parser.parse_args()
    figures = decoding(arguments.tokens, arguments.window)
    print(f"milliseconds a token, in {STRETCHES} stretches of {arguments.tokens // STRETCHES}:")
    for name, seconds in figures["seconds_per_token"].items():
        shown = " ".join(f"{1e3 * x:6.2f}" for x in seconds)
        difference = figures["difference"][name]
        print(f"  {name:10} {shown}   logits off by {difference:.1e} at most")
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
