"""What the heads of a trained run look at, and what each of them is worth.

    python experiments/heads.py runs/stdlib --picture heads.png

What heads learn is an open question (lecture 11 §4). Detectors say where a head's weight goes, as a
share of it: to the token before, to itself, to the first one, to where the same token stood, or one
place after that, which is what copying needs (induction, Olsson et al. 2022). Ablation says what is
lost without it: its output is replaced by its mean, and the loss measured again. A high score is no
proof of a purpose: an untrained model's scores, and the effect, stand beside it.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run
from windows import evenly

from jaxformer.functional import cross_entropy
from jaxformer.functional.taps import Patch
from jaxformer.hub.load import load
from jaxformer.models.build import init
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split

DETECTORS = ("the token before", "itself", "the first", "the same before", "one after the same")
TASKS = ("on text", "on random tokens that come twice")


def detected(text, repeated):
    """[detectors, layers, heads]: mean shares of the weight over the second half of each row.

    text, repeated: weights [layers, batch, heads, length, length] on a text, and on random tokens
    that come twice, so that the same token stood half a row before.
    """
    length = text.shape[-1]
    rows = np.arange(length // 2, length)
    half = rows - length // 2
    places = (
        (text, rows - 1),
        (text, rows),
        (text, 0 * rows),
        (repeated, half),
        (repeated, half + 1),
    )
    shares = [np.asarray(w, np.float64)[..., rows, column] for w, column in places]
    return np.array([share.mean(axis=(1, 3)) for share in shares])


@partial(jax.jit, static_argnums=0)
def looked_at(model, variables, tokens):
    """(weights, each head's mean output [layers, 1, heads, 1, head_dim])."""
    points = ("attention.weights", "attention.heads")
    _, found = model.apply(variables, tokens, capture=points, method="inspect")
    return found[points[0]], found[points[1]].mean(axis=(1, 3), keepdims=True)


@partial(jax.jit, static_argnums=0)
def losses(model, variables, tokens, where, means):
    """Nats per token of the second halves, the heads of `where` replaced by their means."""
    patch = {"attention.heads": Patch(where, means)}
    logits, _ = model.apply(variables, tokens[:, :-1], patch=patch, method="inspect")
    half = tokens.shape[1] // 2
    return cross_entropy(logits[:, half - 1 :], tokens[:, half:])


def ablated(model, variables, tokens, means):
    """(loss, [layers, heads]: how much more it is without that head)."""
    heads = (model.config.num_layers, model.config.num_heads)
    nothing = np.zeros((heads[0], 1, heads[1], 1, 1), bool)
    whole = float(losses(model, variables, tokens, nothing, means))
    more = np.zeros(heads)
    for layer, head in np.ndindex(heads):
        where = nothing.copy()
        where[layer, 0, head] = True
        more[layer, head] = float(losses(model, variables, tokens, where, means)) - whole
    return whole, more


def read(paths, tokenizer, length: int, rows: int, seed: int = 0):
    """(held-out windows of the text, random tokens that come twice), [rows, length] each,
    or one less if that is odd."""
    documents = read_documents(paths)[0] if paths else standard_library()
    held_out = split(documents, *DEFAULT_SPLIT)[1]
    ids = [token for some in held_out for token in tokenizer.encode(some.text)]
    half = length // 2
    random = np.random.default_rng(seed).integers(0, tokenizer.vocab_size, (rows, half))
    return evenly(np.array(ids), 2 * half - 1, rows), np.tile(random, 2).astype(np.int32)


def draw(scores, untrained, parts, path: Path) -> None:
    """Where the weight goes, and what is lost: layers upwards, heads across."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1)
    above.suptitle(
        "Where a head's weight goes (share of it; in brackets, the most in an untrained model)"
    )
    below.suptitle("What is lost without it (nats per token more, its output replaced by its mean)")
    panels = above.subplots(1, len(DETECTORS)), below.subplots(1, len(TASKS))
    for i, axes in enumerate(panels[0]):
        title = f"{DETECTORS[i]} ({untrained[i].max():.2f})"
        _table(axes, title, scores[i], "viridis", 0.0, max(float(scores.max()), 0.1))
    for axes, name, (whole, more) in zip(panels[1], TASKS, parts, strict=True):
        most = max(float(np.abs(more).max()), 1e-3)
        _table(axes, f"{name} ({whole:.2f} with all heads)", more, "coolwarm", -most, most)
    figure.savefig(path, dpi=110)


def _table(axes, name, values, colours, low, high):
    axes.imshow(values, cmap=colours, vmin=low, vmax=high, origin="lower", aspect="auto")
    for layer, head in np.ndindex(values.shape):
        share = (values[layer, head] - low) / (high - low)
        dark = share < 0.5 if colours == "viridis" else abs(share - 0.5) > 0.35
        axes.text(
            head,
            layer,
            f"{values[layer, head]:.2f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if dark else "black",
        )
    axes.set(title=name, xlabel="head", ylabel="layer")
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(values.shape[0]))


def main():
    parser = Parser(__doc__)
    parser.add_argument("run", help="a folder that `jaxformer train` made")
    parser.add_argument("text", nargs="*", type=Path, help="files and folders; none: the library's")
    parser.add_argument("--rows", type=at_least(2), default=64)
    parser.add_argument("--picture", type=picture, default="heads.png")
    arguments = parser.parse_args()
    model, variables, tokenizer = load(arguments.run)
    if "attention.weights" not in getattr(model, "points", ()):
        raise ValueError(f"{arguments.run} is a {type(model).__name__}; it has no heads to look at")
    texts = read(arguments.text, tokenizer, model.config.max_length, arguments.rows)
    found = [looked_at(model, variables, tokens) for tokens in texts]
    scores = detected(*(weights for weights, _ in found))
    fresh = init(model, jax.random.key(1))
    untrained = detected(*(looked_at(model, fresh, tokens)[0] for tokens in texts))
    parts = [
        ablated(model, variables, tokens, jnp.asarray(means))
        for tokens, (_, means) in zip(texts, found, strict=True)
    ]
    for i, name in enumerate(DETECTORS):
        shown = " ".join(f"{value:.2f}" for value in scores[i].ravel())
        print(f"{name:19} {shown}   untrained: {untrained[i].max():.2f} at most")
    for name, (whole, more) in zip(TASKS, parts, strict=True):
        shown = " ".join(f"{value:+.2f}" for value in more.ravel())
        print(f"without, {name:32} {shown}   with all: {whole:.2f} nats")
    figures = {
        "shares": dict(zip(DETECTORS, scores.round(4).tolist(), strict=True)),
        "shares untrained, at most": dict(
            zip(DETECTORS, untrained.max(axis=(1, 2)).round(4).tolist(), strict=True)
        ),
        "loss": {name: whole for name, (whole, _) in zip(TASKS, parts, strict=True)},
        "loss without": {
            name: m.round(4).tolist() for name, (_, m) in zip(TASKS, parts, strict=True)
        },
    }
    conclude(figures, arguments.record)
    draw(scores, untrained, parts, arguments.picture)


if __name__ == "__main__":
    run(main)
