"""Compares the training, decoding and compilation speed of this commit and another commit.

    git worktree add ../before f5f0ecf
    python experiments/bench_before.py ../before
    python experiments/bench_before.py ../before --what decode-1 decode-8 --rounds 9

Each version runs in its own process, which imports the package from its folder. A ratio above 1
means that this commit is faster. To see the noise of the machine, compare this commit with a second
worktree of the same commit.
"""

import sys
from functools import partial
from pathlib import Path

from record import Parser, at_least, conclude, run
from side_by_side import compare, ratio

HERE = Path(__file__).resolve().parent.parent
# Earlier commits define these public functions under other names.
RENAMED = {
    "extend": "advance",
    "init_cache": "start",
    "pack_weights": "prepare",
    "tune_cpu_runtime": "keep_freed_memory",
}


def of(folder: str, make, *arguments):
    """Calls make(*arguments) with the package in `folder` imported."""
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxformer"]:
        del sys.modules[name]
    import jax

    import jaxformer

    if not Path(jaxformer.__file__).is_relative_to(Path(folder).resolve()):
        raise RuntimeError(f"{jaxformer.__file__} is not in {folder}")
    # `side_by_side` has changed this setting. JAX's default is restored here, because each version
    # of jaxformer decides in `tune_cpu_runtime` whether to change it.
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    for name, old in RENAMED.items():
        if not hasattr(jaxformer, name):
            setattr(jaxformer, name, getattr(jaxformer, old))
    jaxformer.tune_cpu_runtime()
    return make(*arguments)


def training(num_layers: int, dim: int, heads: int, vocab_size: int, length: int, batch: int):
    """Returns a function that runs one update of a decoder."""
    import numpy as np

    from jaxformer import DecoderConfig

    sequences = (
        np.random.default_rng(0).integers(0, vocab_size, (1, batch, length + 1)).astype(np.int32)
    )
    return updates(DecoderConfig(vocab_size, length, num_layers, dim, heads), sequences)


def updates(config, sequences, segment_ids=None):
    """Returns a function that runs one update of `make_step` on sequences of tokens."""
    import jax
    import optax

    import jaxformer as jf
    from jaxformer.training.step import init_state, make_step

    try:
        from jaxformer.training.batch import Batch
    except ImportError:  # Commits before b21995c define `Batch` here.
        from jaxformer.training.step import Batch

    model = jf.build(config, jf.Execution(layers="unrolled"))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, weight_decay=0.1))
    state = jax.jit(lambda: init_state(model, optimizer, 0))()
    step = make_step(model, optimizer)
    data = Batch(sequences[..., :-1], sequences[..., 1:])
    if segment_ids is not None:
        name = "segment_ids" if "segment_ids" in Batch._fields else "segments"
        data = data._replace(**{name: segment_ids})

    def run():
        nonlocal state
        state, measured = step(state, data)
        jax.block_until_ready(measured)

    return run


def other_kind(name: str):
    """Returns a function that runs one update of an LSTM or a CNN on packed, padded documents."""
    import numpy as np

    import jaxformer as jf

    sizes = {"vocab_size": 2048, "max_length": 256}
    config = {
        "lstm": lambda: jf.RecurrentConfig(embed_dim=224, num_layers=2, **sizes),
        "cnn": lambda: jf.ConvolutionalConfig(
            embed_dim=160, num_layers=7, kernel_size=4, dilation_growth=2, **sizes
        ),
    }[name]()
    sequences = np.random.default_rng(0).integers(0, 2048, (1, 16, 257)).astype(np.int32)
    segment_ids = np.broadcast_to(np.arange(256) // 90 + 1, (1, 16, 256)).astype(np.int32).copy()
    segment_ids[..., 240:] = 0
    return updates(config, sequences, segment_ids)


def own_text(name: str):
    """Returns a function that generates 64 tokens for 8 prompts with an LSTM or a CNN."""
    import jax
    import numpy as np

    import jaxformer as jf

    kind = {"lstm": jf.RecurrentConfig, "cnn": jf.ConvolutionalConfig}[name]
    model, prompts = jf.build(kind(vocab_size=2048, embed_dim=256)), np.ones((8, 100), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), prompts)
    ready, greedy = jf.pack_weights(model, variables), jf.Sampler(temperature=0.0)
    return lambda: jf.generate(model, ready, prompts, max_new_tokens=64, sampler=greedy)


def gpt2():
    """Returns GPT-2 124M and weights packed for decoding."""
    import jax
    import jax.numpy as jnp

    import jaxformer as jf

    model = jf.Decoder(jf.preset("gpt2-124m"))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jf.pack_weights(model, variables)


def decoding(batch: int, new_tokens: int):
    """Returns a function that generates from prompts of 100 tokens."""
    import numpy as np

    import jaxformer as jf

    (model, ready), greedy = gpt2(), jf.Sampler(temperature=0.0)
    prompts = np.ones((batch, 100), np.int32)

    def run():
        jf.generate(model, ready, prompts, max_new_tokens=new_tokens, sampler=greedy)

    return run


def beam(width: int, new_tokens: int):
    """Returns a function that runs beam search for one prompt of 100 tokens."""
    import numpy as np

    import jaxformer as jf

    model, ready = gpt2()
    prompt = np.ones((1, 100), np.int32)

    def run():
        jf.beam_search(model, ready, prompt, max_new_tokens=new_tokens, beam_width=width)

    return run


def own_loop(new_tokens: int):
    """Returns a function that decodes one sequence in a compiled loop around `extend`."""
    import jax
    import numpy as np

    import jaxformer as jf

    try:
        from jaxformer.decoding.loop_cache import LoopCache

        names = ("from_cache", "to_cache") if hasattr(LoopCache, "to_cache") else ("of", "restored")
        carried, restored = (getattr(LoopCache, name) for name in names)
    except ImportError:  # Earlier versions of jaxformer do not pack weights.
        carried = restored = lambda cache: cache
    model, ready = gpt2()
    prompt = np.ones((1, 100), np.int32)

    @jax.jit
    def greedy(variables, prompt):
        cache = jf.init_cache(model, variables, 1, 192)
        logits, cache = jf.extend(model, variables, prompt, cache.live_prefix(192))

        def step(carry, _):
            cache, token = carry
            logits, cache = jf.extend(model, variables, token[:, None], restored(cache))
            return (carried(cache), logits[:, -1].argmax(axis=-1)), token

        first = logits[:, -1].argmax(axis=-1)
        return jax.lax.scan(step, (carried(cache), first), length=new_tokens)[1]

    return lambda: jax.block_until_ready(greedy(ready, prompt))


def compiling():
    """Returns a function that clears JAX's caches, then compiles and runs a decoder's update."""
    import jax

    run = training(6, 128, 4, 65, 64, 4)

    def compile():
        jax.clear_caches()
        run()

    return compile


WORK = {
    "train-10.8m": partial(training, 6, 384, 6, 65, 256, 16),
    "train-124m": partial(training, 12, 768, 12, 50257, 256, 2),
    "decode-1": partial(decoding, 1, 64),
    "decode-8": partial(decoding, 8, 64),
    "first-token": partial(decoding, 1, 1),
    "beam-4": partial(beam, 4, 64),
    "loop-1": partial(own_loop, 64),
    "compile": compiling,
    "train-lstm": partial(other_kind, "lstm"),
    "train-cnn": partial(other_kind, "cnn"),
    "decode-lstm": partial(own_text, "lstm"),
    "decode-cnn": partial(own_text, "cnn"),
}


def main():
    parser = Parser(__doc__)
    parser.add_argument(
        "before", type=Path, help="folder of a worktree of the commit to compare with"
    )
    parser.add_argument("--what", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--rounds", type=at_least(1), default=7)
    arguments = parser.parse_args()
    before, lines = str(arguments.before.resolve()), []
    for name in arguments.what:
        sides = {"now": str(HERE), "before": before}
        found = compare(
            {side: partial(of, folder, WORK[name]) for side, folder in sides.items()},
            arguments.rounds,
        )
        times = {side: subject.median for side, subject in found.items()}
        speed = ratio(found["now"], found["before"])
        print(
            f"{name:12} now {1e3 * times['now']:9.1f} ms, before {1e3 * times['before']:9.1f} ms: "
            f"{speed:.3f} times as fast"
        )
        lines.append({"what": name, **times, "ratio": speed})
    conclude(lines, arguments.record)


if __name__ == "__main__":
    run(main)
