"""Measures which tokens the heads of a trained run attend to, and the loss without each head.

    python experiments/heads.py runs/stdlib --picture heads.png

What heads learn is an open question (lecture 11 §4). The script plots the scores of each head and
the loss without the head (`jaxformer.interpret.atlas`), on held-out text and on repeated random
tokens. A high score is not evidence that a head has learned a function, so the script also prints
the highest score of an untrained model.
"""

from pathlib import Path

import jax
import numpy as np
from record import Parser, at_least, conclude, picture, run
from windows import evenly

from jaxformer.artifacts.run import RunFolder
from jaxformer.hub.load import load
from jaxformer.interpret import atlas_figure, next_token_batch, repeated_batch
from jaxformer.interpret.atlas import head_atlas
from jaxformer.interpret.layers import heads_shape
from jaxformer.models.parameters import init
from jaxformer.training.config import Inputs
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.run_folders import read_run, run_name
from jaxformer.training.tasks.text import read_data


def held_out_ids(paths, run, tokenizer):
    """Returns (name, ids) of the held-out part of a text.

    Args:
        paths: Files and folders. If empty, the function uses the training text of the run. If the
            run has no text, the function uses the source of the standard library.
        run: The folder of the model.
        tokenizer: The model's tokenizer.
    """
    folder = RunFolder(run)
    if not paths and folder.held_out_tokens.exists():
        return run_name(read_run(folder)[0], "decoder"), np.array(read_data(folder).held_out.ids)
    documents = read_documents(paths)[0] if paths else standard_library()
    held_out = split(documents, *DEFAULT_SPLIT)[1]
    ids = [token for some in held_out for token in tokenizer.encode(some.text)]
    return run_name(Inputs(tuple(paths)), "decoder"), np.array(ids)


def measure(model, variables, texts: dict) -> dict:
    """Returns the scores and effects of all heads (`head_atlas`), by the name of the text."""
    return {name: head_atlas(model, variables, batch) for name, batch in texts.items()}


def figures(atlases: dict, untrained: dict) -> dict:
    """Returns {name of a text: its loss, and the scores and effects of all heads} for JSON."""
    return {
        name: {
            "loss": atlas.loss,
            "scores": {x: _plain(score) for x, score in atlas.scores.items()},
            "highest untrained score": {
                x: _plain(score.max()) for x, score in untrained[name].scores.items()
            },
            "effect": _plain(atlas.effect),
            "standard error": _plain(atlas.standard_error),
        }
        for name, atlas in atlases.items()
    }


def _plain(values):
    """Rounds the values; returns None if any value is NaN, because JSON has no NaN."""
    values = np.asarray(values, np.float64)
    return None if np.isnan(values).any() else values.round(4).tolist()


def show(name: str, atlas, untrained) -> None:
    """Prints each score and the effect of every head, layer by layer."""
    print(f"{name}: {atlas.loss:.2f} nats per token")
    for x, score in atlas.scores.items():
        if not np.isnan(score).all():
            shown = " ".join(f"{value:.2f}" for value in score.ravel())
            print(f"  {x:16} {shown}   largest untrained: {untrained.scores[x].max():.2f}")
    shown = " ".join(f"{value:+.2f}" for value in atlas.effect.ravel())
    print(f"  {'ablation':16} {shown}   largest standard error: {atlas.standard_error.max():.2g}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("run", help="a folder made by `jaxformer train`")
    parser.add_argument("text", nargs="*", type=Path, help="default: the run's own text")
    parser.add_argument("--num-sequences", type=at_least(2), default=64)
    parser.add_argument("--picture", type=picture, default="heads.png")
    arguments = parser.parse_args()
    model, variables, tokenizer = load(arguments.run)
    # This call raises an error if a layer of the model has no attention heads.
    heads_shape(model, "attention")
    name, ids = held_out_ids(arguments.text, arguments.run, tokenizer)
    print(f"text: the held-out part of {name}, {len(ids):,} tokens")
    length = model.config.max_length
    sequences = evenly(ids, length - 1, arguments.num_sequences)
    texts = {
        f"held-out {name}": next_token_batch(model, sequences),
        "repeated random tokens": repeated_batch(
            tokenizer.vocab_size, length, arguments.num_sequences
        ),
    }
    atlases = measure(model, variables, texts)
    untrained = measure(model, init(model, jax.random.key(1)), texts)
    for each, atlas in atlases.items():
        show(each, atlas, untrained[each])
    conclude(figures(atlases, untrained), arguments.record)
    atlas_figure(atlases).savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    run(main)
