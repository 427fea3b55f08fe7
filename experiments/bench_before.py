"""Compares the speed of this commit with another one: training, decoding, compilation.

    git worktree add ../before f5f0ecf
    python experiments/bench_before.py ../before
    python experiments/bench_before.py ../before --what decode-1 decode-8 --rounds 9

Each version runs in its own process, which imports the package from its folder. A ratio above 1
means that this commit is faster. Comparing with a second worktree of this commit shows the drift of
the machine.
"""

import sys
from functools import partial
from pathlib import Path

from record import Parser, at_least, conclude, run
from side_by_side import compare, ratio

HERE = Path(__file__).resolve().parent.parent


def of(folder: str, make, *arguments):
    """Calls make(*arguments) with the package in `folder` imported."""
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxformer"]:
        del sys.modules[name]
    import jax

    import jaxformer

    if not Path(jaxformer.__file__).is_relative_to(Path(folder).resolve()):
        raise RuntimeError(f"{jaxformer.__file__} is not in {folder}")
    # JAX's default, which side_by_side has changed: each version makes its own choice.
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    jaxformer.keep_freed_memory()
    return make(*arguments)


def training(num_layers: int, dim: int, heads: int, vocab_size: int, length: int, batch: int):
    """Returns a function that runs one update of a decoder."""
    import numpy as np

    from jaxformer import DecoderConfig

    rows = np.random.default_rng(0).integers(0, vocab_size, (1, batch, length + 1)).astype(np.int32)
    return updates(DecoderConfig(vocab_size, length, num_layers, dim, heads), rows)


def updates(config, rows, segments=None):
    """Returns a function that runs one update of `make_step` on rows of tokens."""
    import jax
    import optax

    import jaxformer as jf
    from jaxformer.training.step import init_state, make_step

    try:
        from jaxformer.training.batch import Batch
    except ImportError:  # a commit before b21995c
        from jaxformer.training.step import Batch

    model = jf.build(config, jf.Execution(layers="unrolled"))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, weight_decay=0.1))
    state = jax.jit(lambda: init_state(model, optimizer, 0))()
    step = make_step(model, optimizer)
    data = Batch(rows[..., :-1], rows[..., 1:])
    if segments is not None:
        data = data._replace(segments=segments)

    def run():
        nonlocal state
        state, measured = step(state, data)
        jax.block_until_ready(measured)

    return run


def other_kind(name: str):
    """Returns a function that runs one update of an LSTM or a CNN, on packed rows with padding."""
    import numpy as np

    import jaxformer as jf

    sizes = {"vocab_size": 2048, "max_length": 256}
    config = {
        "lstm": lambda: jf.RecurrentConfig(embed_dim=224, num_layers=2, **sizes),
        "cnn": lambda: jf.ConvolutionalConfig(
            embed_dim=160, num_layers=7, kernel_size=4, dilation_growth=2, **sizes
        ),
    }[name]()
    rows = np.random.default_rng(0).integers(0, 2048, (1, 16, 257)).astype(np.int32)
    segments = np.broadcast_to(np.arange(256) // 90 + 1, (1, 16, 256)).astype(np.int32).copy()
    segments[..., 240:] = 0
    return updates(config, rows, segments)


def own_text(name: str):
    """Returns a function that generates 64 tokens with an LSTM or a CNN, for 8 rows."""
    import jax
    import numpy as np

    import jaxformer as jf

    kind = {"lstm": jf.RecurrentConfig, "cnn": jf.ConvolutionalConfig}[name]
    model, prompts = jf.build(kind(vocab_size=2048, embed_dim=256)), np.ones((8, 100), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), prompts)
    ready, greedy = jf.prepare(model, variables), jf.Sampler(temperature=0.0)
    return lambda: jf.generate(model, ready, prompts, max_new_tokens=64, sampler=greedy)


def gpt2():
    """Returns GPT-2 124M and prepared weights."""
    import jax
    import jax.numpy as jnp

    import jaxformer as jf

    model = jf.Decoder(jf.preset("gpt2-124m"))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jf.prepare(model, variables)


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
    """Returns a function that searches the continuations of one prompt of 100 tokens."""
    import numpy as np

    import jaxformer as jf

    model, ready = gpt2()
    prompt = np.ones((1, 100), np.int32)

    def run():
        jf.beam_search(model, ready, prompt, max_new_tokens=new_tokens, beam_width=width)

    return run


def own_loop(new_tokens: int):
    """Returns a function that runs a caller's compiled loop around `advance`, for one row."""
    import jax
    import numpy as np

    import jaxformer as jf

    try:
        from jaxformer.decoding.loop_cache import LoopCache

        carried, restored = LoopCache.of, LoopCache.restored
    except ImportError:  # a version without this layout
        carried = restored = lambda cache: cache
    model, ready = gpt2()
    prompt = np.ones((1, 100), np.int32)

    @jax.jit
    def greedy(variables, prompt):
        cache = jf.start(model, variables, 1, 192)
        logits, cache = jf.advance(model, variables, prompt, cache.live_prefix(192))

        def step(carry, _):
            cache, token = carry
            logits, cache = jf.advance(model, variables, token[:, None], restored(cache))
            return (carried(cache), logits[:, -1].argmax(axis=-1)), token

        first = logits[:, -1].argmax(axis=-1)
        return jax.lax.scan(step, (carried(cache), first), length=new_tokens)[1]

    return lambda: jax.block_until_ready(greedy(ready, prompt))


def compiling():
    """Returns a function that clears JAX's caches, then compiles and runs an update of 6 layers."""
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
    parser.add_argument("before", type=Path, help="a worktree of the other commit")
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
