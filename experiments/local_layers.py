"""Measures decoding with a window in five layers of six, as in Gemma 3: memory and time per token.

    python experiments/local_layers.py                       # 8,192 tokens, windows of 512
    python experiments/local_layers.py --record local-layers-cpu

A model of 12 layers × 256 features reads a random text and then generates 32 tokens. The script
compares the memory, the time per token and the greedy tokens of two caches. In the cache "windows",
layers with a window store only the window. In the cache "all tokens", all layers store all tokens.
"""

import statistics
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.bench.measurement import Rounds, time_alternately

# Each measured run decodes this many tokens.
STEPS = 32
WAYS = {"windows": None, "all tokens": False}


def measured(num_tokens: int, window: int, rounds: int) -> dict:
    """Measures the bytes of each cache in `WAYS`, and the seconds per generated token."""
    config = jf.DecoderConfig(
        vocab_size=1024,
        max_length=num_tokens,
        num_layers=12,
        embed_dim=256,
        num_heads=4,
        positions="rotary",
        window=(*[window] * 5, None),
    )
    model, read = jf.Decoder(config), num_tokens - STEPS
    variables = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    text = np.random.default_rng(0).integers(0, 1024, (1, read)).astype(np.int32)
    prepared, found, runs = jf.pack_weights(model, variables), {}, {}

    @jax.jit
    def greedy(cache):
        def step(carry, _):
            token, cache = carry
            logits, cache = jf.extend(model, prepared, token, cache)
            token = logits[:, -1:].argmax(axis=-1).astype(jnp.int32)
            return (token, cache), token[0, 0]

        return jax.lax.scan(step, (jnp.zeros((1, 1), jnp.int32), cache), length=STEPS)[1]

    for name, ring in WAYS.items():
        cache = jf.init_cache(model, prepared, 1, num_tokens, ring=ring)
        for part in np.split(text, range(1024, read, 1024), axis=1):
            _, cache = jf.extend(model, prepared, part, cache)
        held = sum(x.nbytes for x in jax.tree.leaves(cache.states))
        found[name] = {"bytes": held, "tokens": np.asarray(greedy(cache)).tolist()}
        runs[name] = partial(Rounds().time, partial(greedy, cache))
    for name, seconds in time_alternately(runs, rounds).items():
        found[name]["seconds_per_token"] = statistics.median(seconds) / STEPS
    return {"window": window, "tokens": num_tokens, "ways": found}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=at_least(2048), default=8192)
    parser.add_argument("--window", type=at_least(1), default=512)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    arguments = parser.parse_args()
    figures = measured(arguments.tokens, arguments.window, arguments.rounds)
    windows, whole = (figures["ways"][name] for name in WAYS)
    for name, way in figures["ways"].items():
        seconds = way["seconds_per_token"]
        print(f"{name:11} {way['bytes'] / 2**20:7.1f} MiB   {1e3 * seconds:6.2f} ms per token")
    figures["memory_ratio"] = whole["bytes"] / windows["bytes"]
    figures["time_ratio"] = whole["seconds_per_token"] / windows["seconds_per_token"]
    figures["equal_tokens"] = windows.pop("tokens") == whole.pop("tokens")
    print(f"memory ÷ {figures['memory_ratio']:.2f}, time ÷ {figures['time_ratio']:.2f}")
    print("the same tokens" if figures["equal_tokens"] else "DIFFERENT TOKENS")
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
