"""Compares greedy decoding of an encoder-decoder with Hugging Face's torch Marian of the same size.

    python experiments/bench_translate.py                 # batch 32, two sizes, float32
    python experiments/bench_translate.py --sources       # time per token by source length

The weights are random, because the time of greedy decoding does not depend on them. Needs torch and
transformers.
"""

from functools import partial

from record import Parser, at_least, conclude, require, run
from side_by_side import compare, table

from jaxformer.bench.measurement import Rounds, Timing, time_alternately
from jaxformer.bench.models import step_seconds

# A run translates `BATCHES` batches. Each source has `SOURCE` tokens. Each translation has `NEW`
# tokens.
SOURCE, NEW, BATCHES = 24, 32, 4

# "small" is the size of the Multi30k model of experiments/translate.py. "base" is the size of the
# base model of Vaswani et al. 2017.
SIZES = {
    "small": {"num_layers": 4, "embed_dim": 128, "num_heads": 4, "mlp_dim": 256, "vocab": 5000},
    "base": {"num_layers": 6, "embed_dim": 512, "num_heads": 8, "mlp_dim": 2048, "vocab": 32_000},
}


def jaxformer_model(size: str):
    """Returns the model and its random weights, packed for decoding."""
    import jax

    import jaxformer as jf
    from jaxformer.models.parameters import init

    config = jf.EncoderDecoderConfig(
        **{name: value for name, value in SIZES[size].items() if name != "vocab"},
        vocab_size=SIZES[size]["vocab"],
        max_length=1024,
        activation="silu",
        norm_position="post",
        positions="sinusoidal",
        scale_embeddings=True,
        head_bias=True,
    )
    model = jf.EncoderDecoder(config)
    return model, jf.pack_weights(model, jax.jit(partial(init, model))(jax.random.key(0)))


def jaxformer_decoding(size: str, batch_size: int):
    """Returns a function that decodes NEW tokens for BATCHES batches of batch_size sources."""
    import numpy as np

    import jaxformer as jf

    model, variables = jaxformer_model(size)
    source = np.random.default_rng(0).integers(1, SIZES[size]["vocab"], (batch_size, SOURCE))
    greedy, prompts = jf.Sampler(temperature=0.0), [[0]] * batch_size
    how = {"max_new_tokens": NEW, "sampler": greedy, "source": source}
    return lambda: [jf.generate(model, variables, prompts, **how) for _ in range(BATCHES)]


def torch_decoding(size: str, batch_size: int):
    """Returns a function that decodes the same batches with Hugging Face's Marian."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    given = SIZES[size]
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", given["num_layers"]),
            ("attention_heads", given["num_heads"]),
            ("ffn_dim", given["mlp_dim"]),
        )
    }
    config = MarianConfig(
        **sides,
        d_model=given["embed_dim"],
        vocab_size=given["vocab"],
        max_position_embeddings=1024,
        activation_function="silu",
        scale_embedding=True,
        pad_token_id=given["vocab"] - 1,
        eos_token_id=0,
        decoder_start_token_id=given["vocab"] - 1,
        forced_eos_token_id=None,
        num_beams=1,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MarianMTModel(config).to(device).eval()
    source = torch.randint(1, given["vocab"] - 1, (batch_size, SOURCE), device=device)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1}

    def run():
        with torch.inference_mode():
            for _ in range(BATCHES):
                model.generate(source, attention_mask=torch.ones_like(source), **options)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def time_per_token_by_source(size: str, lengths, batch_size: int, rounds: int) -> dict:
    """Returns {source length: (milliseconds to encode the source, milliseconds per token)}."""
    import numpy as np

    import jaxformer as jf
    from jaxformer.decoding.steps import STEPS

    (model, variables), timer = jaxformer_model(size), Rounds()
    greedy, prompts = jf.Sampler(temperature=0.0), [[0]] * batch_size
    how = {"max_new_tokens": 1 + STEPS, "sampler": greedy}

    def reading(source) -> float:
        return timer.time(lambda: jf.init_cache(model, variables, batch_size, 2 * STEPS, source))

    def decoding(source) -> float:
        run = partial(jf.generate, model, variables, prompts, source=source, **how)
        return step_seconds(run, timer.clock) / STEPS

    timers = {
        (length, timed): partial(timed, np.ones((batch_size, length), np.int32))
        for length in lengths
        for timed in (reading, decoding)
    }
    medians = {
        key: 1e3 * Timing.of(x).median for key, x in time_alternately(timers, rounds).items()
    }
    return {length: (medians[length, reading], medians[length, decoding]) for length in lengths}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch-size", type=at_least(1), default=32)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument(
        "--sources", action="store_true", help="measure only the time per token, by source length"
    )
    arguments = parser.parse_args()
    if arguments.sources:
        conclude(report_sources(arguments), arguments.record)
        return
    require("torch", "transformers")
    lines = []
    for size in arguments.sizes:
        given = (size, arguments.batch_size)
        subjects = compare(
            {
                "jaxformer": partial(jaxformer_decoding, *given),
                "torch Marian": partial(torch_decoding, *given),
            },
            arguments.rounds,
        )
        lines.append(report(size, arguments.batch_size, subjects))
    conclude(lines, arguments.record)


def report(size, batch_size, subjects) -> dict:
    """Prints a table and returns the measurements."""
    print(f"\n{size}, {BATCHES} batches of {batch_size}: {SOURCE} source tokens, {NEW} new tokens")
    return {"size": size, "batch_size": batch_size} | table(subjects, BATCHES * batch_size * NEW)


def report_sources(arguments) -> dict:
    """Prints a table and returns the milliseconds by source length."""
    lines = {}
    for size in arguments.sizes:
        given = (size, (16, 64, 256), arguments.batch_size, arguments.rounds)
        print(f"\n{size}, batch {arguments.batch_size}")
        for length, (reading, token) in time_per_token_by_source(*given).items():
            print(f"  source {length:4}: read in {reading:8.1f} ms, {token:7.2f} ms per token")
            lines[f"{size} {length}"] = {"milliseconds_to_read": reading, "a_token": token}
    return lines


if __name__ == "__main__":
    run(main)
