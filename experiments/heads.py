"""Measures where the heads of a trained run look, and how much each head lowers the loss.

    python experiments/heads.py runs/stdlib --picture heads.png

What heads learn is an open question (lecture 11 §4). Detectors report the share of a head's weight
that goes to the previous token, to the token itself, to the first token, to an earlier copy of the
token, or to the position after that copy. The last one is what copying needs (induction, Olsson et
al. 2022). Ablation replaces a head's output by its mean and reports the increase of the loss. A
high score does not prove a purpose, so the scores of an untrained model stand beside it.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import Parser, at_least, conclude, picture, run
from windows import evenly

from jaxformer.artifacts.run import RunFolder
from jaxformer.functional import cross_entropy
from jaxformer.functional.taps import Patch
from jaxformer.hub.load import load
from jaxformer.models.parameters import init
from jaxformer.training.config import Inputs
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.prepare import read_data
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.run_folders import read_run, run_name

DETECTORS = ("the token before", "itself", "the first", "the same before", "one after the same")
TASKS = ("on text", "on random tokens that come twice")


def detected(text, repeated):
    """Returns mean shares of attention weight, [detectors, layers, heads].

    Only the second half of each sequence is measured.

    Args:
        text: attention weights [layers, batch, heads, length, length] on a text.
        repeated: the same on a random sequence that occurs twice, so that every token has a copy
            half a sequence earlier.
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
    """Returns (weights, each head's mean output [layers, 1, heads, 1, head_dim])."""
    points = ("attention.weights", "attention.heads")
    _, found = model.apply(variables, tokens, capture=points, method="inspect")
    return found[points[0]], found[points[1]].mean(axis=(1, 3), keepdims=True)


@partial(jax.jit, static_argnums=0)
def losses(model, variables, tokens, where, means):
    """Returns nats per token of the second halves, with the heads in `where` set to their means."""
    patch = {"attention.heads": Patch(where, means)}
    logits, _ = model.apply(variables, tokens[:, :-1], patch=patch, method="inspect")
    half = tokens.shape[1] // 2
    return cross_entropy(logits[:, half - 1 :], tokens[:, half:])


def ablated(model, variables, tokens, means):
    """Returns (loss, its increase without each head [layers, heads])."""
    heads = (model.config.num_layers, model.config.num_heads)
    nothing = np.zeros((heads[0], 1, heads[1], 1, 1), bool)
    whole = float(losses(model, variables, tokens, nothing, means))
    more = np.zeros(heads)
    for layer, head in np.ndindex(heads):
        where = nothing.copy()
        where[layer, 0, head] = True
        more[layer, head] = float(losses(model, variables, tokens, where, means)) - whole
    return whole, more


def held_out_ids(paths, run, tokenizer):
    """Returns (name, ids) of the held-out part of a text.

    Args:
        paths: files and folders. If empty, the text that the run was trained on, or the standard
            library for a model without a text.
        run: the folder of the model.
        tokenizer: the model's tokenizer.
    """
    folder = RunFolder(run)
    if not paths and folder.held_out_tokens.exists():
        return run_name(read_run(folder)[0], "decoder"), np.array(read_data(folder).held_out.ids)
    documents = read_documents(paths)[0] if paths else standard_library()
    held_out = split(documents, *DEFAULT_SPLIT)[1]
    ids = [token for some in held_out for token in tokenizer.encode(some.text)]
    return run_name(Inputs(tuple(paths)), "decoder"), np.array(ids)


def read(ids, vocab_size: int, length: int, rows: int, seed: int = 0):
    """Returns (windows of a text, random sequences that occur twice), each [rows, length].

    An odd length is reduced by one.
    """
    half = length // 2
    random = np.random.default_rng(seed).integers(0, vocab_size, (rows, half))
    return evenly(ids, 2 * half - 1, rows), np.tile(random, 2).astype(np.int32)


def draw(scores, untrained, parts, path: Path) -> None:
    """Draws the shares of weight above and the effects of ablation below, layers by heads."""
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
    parser.add_argument("run", help="a folder made by `jaxformer train`")
    parser.add_argument("text", nargs="*", type=Path, help="default: the run's own text")
    parser.add_argument("--rows", type=at_least(2), default=64)
    parser.add_argument("--picture", type=picture, default="heads.png")
    arguments = parser.parse_args()
    model, variables, tokenizer = load(arguments.run)
    if "attention.weights" not in getattr(model, "points", ()):
        raise ValueError(f"{arguments.run} is a {type(model).__name__}; it has no heads to look at")
    name, ids = held_out_ids(arguments.text, arguments.run, tokenizer)
    print(f"text: the held-out part of {name}, {len(ids):,} tokens")
    texts = read(ids, tokenizer.vocab_size, model.config.max_length, arguments.rows)
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
