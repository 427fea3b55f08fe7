"""Compares an encoder with a decoder of the same size at predicting masked tokens.

    python experiments/fill_in.py              # the standard library's source
    python experiments/fill_in.py TEXT… --steps 2000

15% of the tokens of held-out text are masked. The encoder sees both sides of a mask; it was trained
on masked tokens, 15% of all tokens. The decoder sees only the tokens before a mask; it was trained
to predict every token. Both models are scored on the same masked tokens.
"""

from functools import partial
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import at_least, conclude, run
from windows import at_random, read_windows, text_parser

import jaxformer as jf
from jaxformer.functional.losses.token_masking import mask_tokens
from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.objectives import summed_loss
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

VOCAB, LENGTH, BATCH, HELD_OUT = 1024, 128, 16, 256
# The id of the mask token is the first id after the tokenizer's ids.
MASK = VOCAB
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


def examples(name, ids, end_of_text: int, seed: int):
    """Yields training batches.

    The encoder predicts tokens that are masked by BERT's rule. The decoder predicts the next token.
    The end-of-text token is never masked.
    """
    random = np.random.default_rng(seed)
    hide = jax.jit(partial(mask_tokens, special=(end_of_text,)), static_argnums=(2, 3))
    for step in count():
        sequences = at_random(random, ids, LENGTH, (1, BATCH))
        if name == "encoder":
            inputs, weights = hide(jax.random.key(step), sequences[..., 1:], MASK, VOCAB + 1)
            yield Batch(inputs, sequences[..., 1:], weights)
        else:
            yield Batch(sequences[..., :-1], sequences[..., 1:])


def train(name, ids, windows, hidden, end_of_text: int, steps: int, seed: int) -> dict:
    """Trains a model and scores it on the masked tokens of held-out text.

    Returns the training curve, a list of (step, loss, accuracy), and the final predictions.
    """
    model = jf.build(CONFIGS[name], jf.Execution(layers="unrolled"))
    recipe = OptimizerConfig(learning_rate=4e-3, warmup_steps=50)
    optimizer = make_optimizer(recipe)
    start = jax.jit(lambda: init_state(model, optimizer, seed))()
    ask, curve = jax.jit(partial(answers, name, model)), []

    def look(step, params):
        loss, right, guesses = ask(params, windows, hidden)
        curve.append((step, float(loss), float(right)))
        print(f"{name} step {step:5}: {loss:.3f} nats, {100 * right:.1f}% right", flush=True)
        return np.asarray(guesses)

    look(0, start.params)
    data, rates = examples(name, ids, end_of_text, seed), Schedule(recipe, steps).rates()
    trained = updates(make_step(model, optimizer), start, data, rates)
    for step, (state, _) in enumerate(trained, 1):
        if step % max(1, steps // 10) == 0 or step == steps:
            guesses = look(step, state.params)
    return {"curve": curve, "guesses": guesses}


def answers(name, model, params, windows, hidden):
    """Returns (loss, accuracy, predictions at all positions) for tokens 1, 2, … of the windows."""
    targets = windows[:, 1:]
    inputs = jnp.where(hidden, MASK, targets) if name == "encoder" else windows[:, :-1]
    batch = Batch(inputs, targets, hidden.astype(jnp.float32))
    loss, count = summed_loss(model, params, batch), hidden.sum()
    guesses = model.apply({"params": params}, inputs).argmax(axis=-1)
    right = jnp.where(hidden, guesses == targets, False).sum() / count
    return loss / count, right, guesses


def draw(results: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, result in results.items():
        steps, losses, right = zip(*result["curve"], strict=True)
        axes[0].plot(steps, losses, label=LABELS[name])
        axes[1].plot(steps, 100 * np.array(right), label=LABELS[name])
    axes[0].set(xlabel="steps", ylabel="nats per masked token", title="loss on held-out text")
    axes[1].set(
        xlabel="steps", ylabel="correctly predicted masked tokens (%)", title="guessed exactly"
    )
    for some in axes:
        some.grid(alpha=0.2)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def show(tokenizer, windows, hidden, guesses, lines: int = 3) -> None:
    """Prints the encoder's input with masked tokens as ▒, and its predictions in ‹ ›."""
    for tokens, here, guess in zip(windows[:lines, 1:41], hidden, guesses, strict=False):
        words = [tokenizer.decode([token]) for token in tokens.tolist()]
        # Early in training, a predicted id may have no token in the tokenizer.
        last = tokenizer.vocab_size - 1
        said = [tokenizer.decode([min(token, last)]) for token in guess.tolist()]
        print("  shown: " + "".join("▒" if h else w for w, h in zip(words, here, strict=False)))
        filled = (f"‹{s}›" if h else w for w, s, h in zip(words, said, here, strict=False))
        print("  filled in: " + "".join(filled) + "\n")


def main():
    parser = text_parser(__doc__, 1000, 10, "fill-in.png")
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    tune_cpu_runtime()
    tokenizer, ids, windows, _ = read_windows(arguments.text, VOCAB, LENGTH, HELD_OUT)
    end = tokenizer.end_of_text
    hidden = np.random.default_rng(arguments.seed).random((HELD_OUT, LENGTH)) < 0.15
    hidden &= windows[:, 1:] != end
    given = (ids, windows, hidden, end, arguments.steps, arguments.seed)
    results = {name: train(name, *given) for name in CONFIGS}
    show(tokenizer, windows, hidden, results["encoder"]["guesses"])
    often = np.bincount(ids).argmax()
    figures = {name: result["curve"] for name, result in results.items()}
    figures["the most frequent token"] = float((windows[:, 1:] == often)[hidden].mean())
    conclude(figures, arguments.record)
    draw(results, arguments.picture)


if __name__ == "__main__":
    run(main)
