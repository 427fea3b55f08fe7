"""Compares greedy decoding of GPT-2 with Hugging Face's torch GPT-2, eager and compiled.

    python experiments/bench_decode.py                    # 124M, batches 1, 8 and 32, float32
    python experiments/bench_decode.py --no-torch         # only jaxformer, float32 and int8
    python experiments/bench_decode.py --capacity         # time per token by cache capacity

The weights are random, because the time of greedy decoding does not depend on them. Needs torch and
transformers.
"""

import statistics
from dataclasses import replace
from functools import partial

from record import Parser, at_least, conclude, require, run
from side_by_side import compare, speedup, table

from jaxformer.bench.measurement import Rounds, time_alternately
from jaxformer.bench.models import greedy_run
from jaxformer.models.config import PRESETS

GPT2 = [name for name in PRESETS if name.startswith("gpt2")]
PROMPT, NEW = 32, 96


def jaxformer_decoding(preset: str, batch_size: int, dtype: str, int8: bool = False):
    """Returns a function that generates NEW tokens per prompt, with int8 matrices if `int8`."""
    import jax
    import jax.numpy as jnp

    import jaxformer as jf
    from jaxformer.functional.linear.affine import quantize_all

    config = replace(jf.preset(preset), dtype=dtype)
    model = jf.Decoder(config)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    if int8:
        variables = {"params": quantize_all(variables["params"])}
    variables = jf.pack_weights(model, variables)
    return greedy_run(model, variables, batch_size, PROMPT, NEW)


def torch_decoding(preset: str, batch_size: int, dtype: str, compiled: bool):
    """Returns a function that runs Hugging Face's `generate`, with a static cache if `compiled`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import jaxformer as jf

    ours = jf.preset(preset)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(n_embd=ours.embed_dim, n_layer=ours.num_layers, n_head=ours.num_heads)
    config.pad_token_id = config.eos_token_id
    model = GPT2LMHeadModel(config).to(device, getattr(torch, dtype)).eval()
    prompts = torch.randint(config.vocab_size, (batch_size, PROMPT), device=device)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    if compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"

    def run():
        with torch.inference_mode():
            model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def time_per_token_by_capacity(preset: str, dtype: str, live: int, capacities, rounds: int):
    """Returns seconds per token by cache capacity, with `live` tokens in the cache."""
    import jax
    import jax.numpy as jnp

    import jaxformer as jf
    from jaxformer.decoding.steps import STEPS, Choice, choose_first, decode_chunk, prefill
    from jaxformer.functional.inputs import Inputs

    model = jf.Decoder(replace(jf.preset(preset), dtype=dtype))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    prepared = jf.pack_weights(model, variables)
    weights = prepared["packed"]
    choice = Choice(None, None, jnp.zeros(0, int))
    inputs = Inputs(*jnp.ones((2, 1, live - STEPS), jnp.int32))

    def seconds(capacity: int) -> float:
        cache = jf.init_cache(model, prepared, 1, capacity)
        passed = prefill(model, weights, inputs, cache)
        state, _ = choose_first(passed.logits, passed.captured, choice)
        given = jax.block_until_ready((passed.cache, state))
        return Rounds().time(lambda: decode_chunk(model, weights, *given, choice, live)) / STEPS

    return time_alternately(
        {capacity: partial(seconds, capacity) for capacity in capacities}, rounds
    )


def main():
    parser = Parser(__doc__)
    parser.add_argument("--preset", choices=GPT2, default="gpt2-124m")
    parser.add_argument(
        "--batch-sizes", type=at_least(1), nargs="+", help="batch sizes to measure; default: 1 8 32"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-torch", action="store_true", help="measure only jaxformer")
    parser.add_argument(
        "--capacity", action="store_true", help="measure only the time per token, by cache capacity"
    )
    arguments = parser.parse_args()
    if arguments.capacity:
        if arguments.batch_sizes:
            raise ValueError(
                "--batch-sizes cannot be used with --capacity, which uses batch size 1"
            )
        conclude(report_capacity(arguments), arguments.record)
        return
    if not arguments.no_torch:
        require("torch", "transformers")
    lines = []
    for batch_size in arguments.batch_sizes or (1, 8, 32):
        given = (arguments.preset, batch_size, arguments.dtype)
        makers = {
            "jaxformer": partial(jaxformer_decoding, *given),
            "jaxformer, int8": partial(jaxformer_decoding, *given, True),
        }
        if not arguments.no_torch:
            makers["torch eager"] = partial(torch_decoding, *given, False)
            makers["torch.compile"] = partial(torch_decoding, *given, True)
        subjects = compare(makers, arguments.rounds)
        lines.append(report(arguments.preset, batch_size, subjects))
    conclude(lines, arguments.record)


def report(preset, batch_size, subjects) -> dict:
    """Prints a table and returns the measurements."""
    print(f"\n{preset}, batch {batch_size}: {PROMPT} prompt tokens, {NEW} new tokens")
    return {"preset": preset, "batch_size": batch_size} | table(subjects, batch_size * NEW)


def report_capacity(arguments) -> dict:
    """Prints a table and returns the milliseconds per token for each capacity of the cache."""
    live, line = 256, {"preset": arguments.preset, "live": 256}
    seconds = time_per_token_by_capacity(
        arguments.preset, arguments.dtype, live, (live, 4 * live, 16 * live), arguments.rounds
    )
    first = seconds[live]
    print(f"\n{arguments.preset}, batch size 1, {live} cached tokens; relative to capacity {live}:")
    for capacity, times in seconds.items():
        relative = speedup(first, times)
        median = 1e3 * statistics.median(times)
        print(f"  capacity {capacity:6}: {median:8.2f} ms per token, {relative:.3f}× as long")
        line[str(capacity)] = {"milliseconds_per_token": median, "ratio": relative}
    return line


if __name__ == "__main__":
    run(main)
