"""Filling in what was hidden: an encoder looks at both sides, a decoder of its size at the left.

    python experiments/fill_in.py              # the standard library's source
    python experiments/fill_in.py TEXT… --steps 2000

Of held-out text one token in seven is hidden. The encoder has learnt from masked tokens, which are
one target in seven; the decoder from every token. Both are asked for the same hidden ones.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import at_least, conclude, run
from windows import at_random, read_windows, text_parser

import jaxformer as jf
from jaxformer.functional import cross_entropy
from jaxformer.functional.masking import mask_tokens
from jaxformer.runtime import keep_freed_memory
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step

VOCAB, LENGTH, BATCH, HELD_OUT = 1024, 128, 16, 256
MASK = VOCAB  # one id more than the tokenizer's
SIZE = {
    "vocab_size": VOCAB + 1,
    "max_length": LENGTH,
    "num_layers": 4,
    "embed_dim": 160,
    "num_heads": 4,
    "positions": "rotary",
}
CONFIGS = {"encoder": jf.EncoderConfig(**SIZE), "decoder": jf.DecoderConfig(**SIZE)}
LABELS = {"encoder": "encoder, from both sides", "decoder": "decoder, from the left"}


def hide(key, tokens):
    """(inputs, weights): what the encoder learns from, by BERT's rule."""
    return mask_tokens(key, tokens, MASK, VOCAB + 1)


def train(name, ids, windows, hidden, steps: int, seed: int) -> dict:
    """(step, loss, share right) on the hidden tokens of held-out text, and the last guesses."""
    model = jf.build(CONFIGS[name], jf.Execution(layers="unrolled"))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=4e-3, warmup_steps=50), steps)
    state = jax.jit(lambda: init_state(model, optimizer, seed))()
    update, random = make_step(model, optimizer), np.random.default_rng(seed)
    ask, mask = jax.jit(partial(answers, name, model)), jax.jit(hide)
    curve = []
    for step in range(steps + 1):
        if step % max(1, steps // 10) == 0 or step == steps:
            loss, right, guesses = ask(state.params, windows, hidden)
            curve.append((step, float(loss), float(right)))
            print(f"{name} step {step:5}: {loss:.3f} nats, {100 * right:.1f}% right", flush=True)
        if step == steps:
            break
        rows = at_random(random, ids, LENGTH, (1, BATCH))
        targets = rows[..., 1:]
        if name == "encoder":
            inputs, weights = mask(jax.random.key(step), targets)
            batch = Batch(inputs, targets, weights)
        else:
            batch = Batch(rows[..., :-1], targets)
        state, _ = update(state, batch)
    return {"curve": curve, "guesses": np.asarray(guesses)}


def answers(name, model, params, windows, hidden):
    """(loss, share right, the guess at each place) of tokens 1, 2, … of the windows."""
    targets = windows[:, 1:]
    inputs = jnp.where(hidden, MASK, targets) if name == "encoder" else windows[:, :-1]
    logits = model.apply({"params": params}, inputs)
    guesses = logits.argmax(axis=-1)
    right = jnp.where(hidden, guesses == targets, False).sum() / hidden.sum()
    return cross_entropy(logits, targets, hidden.astype(jnp.float32)), right, guesses


def draw(results: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, result in results.items():
        steps, losses, right = zip(*result["curve"], strict=True)
        axes[0].plot(steps, losses, label=LABELS[name])
        axes[1].plot(steps, 100 * np.array(right), label=LABELS[name])
    axes[0].set(xlabel="steps", ylabel="nats per hidden token", title="loss on held-out text")
    axes[1].set(xlabel="steps", ylabel="hidden tokens guessed (%)", title="guessed exactly")
    for some in axes:
        some.grid(alpha=0.2)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def show(tokenizer, windows, hidden, guesses, lines: int = 3) -> None:
    """What the encoder was shown, a hidden token as ▒, and what it put there, in ‹ ›."""
    for tokens, here, guess in zip(windows[:lines, 1:41], hidden, guesses, strict=False):
        words = [tokenizer.decode([token]) for token in tokens.tolist()]
        last = tokenizer.vocab_size - 1  # an early guess may be no token at all
        said = [tokenizer.decode([min(token, last)]) for token in guess.tolist()]
        print("  shown: " + "".join("▒" if h else w for w, h in zip(words, here, strict=False)))
        filled = (f"‹{s}›" if h else w for w, s, h in zip(words, said, here, strict=False))
        print("  filled in: " + "".join(filled) + "\n")


def main():
    parser = text_parser(__doc__, 1000, 10, "fill-in.png")
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    keep_freed_memory()
    tokenizer, ids, windows, _ = read_windows(arguments.text, VOCAB, LENGTH, HELD_OUT)
    hidden = np.random.default_rng(arguments.seed).random((HELD_OUT, LENGTH)) < 0.15
    given = (ids, windows, hidden, arguments.steps, arguments.seed)
    results = {name: train(name, *given) for name in CONFIGS}
    show(tokenizer, windows, hidden, results["encoder"]["guesses"])
    often = np.bincount(ids).argmax()
    figures = {name: result["curve"] for name, result in results.items()}
    figures["the most frequent token"] = float((windows[:, 1:] == often)[hidden].mean())
    conclude(figures, arguments.record)
    draw(results, arguments.picture)


if __name__ == "__main__":
    run(main)
