"""From a folder to a model that runs."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import RunFolder, parse_model
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.build import build, init


class Checkpoint(NamedTuple):
    """A model, its variables and its tokenizer."""

    model: Any
    variables: dict
    tokenizer: Tokenizer


def load(source: str | Path) -> Checkpoint:
    """The newest whole checkpoint of a run folder; a warning if newer ones are damaged.

    ValueError if the folder is missing, holds no run or no complete checkpoint, or if its
    parameters are not those of its config.
    """
    if not Path(source).is_dir():
        raise ValueError(f"{source} is not a folder; it must be a run that `jaxformer train` made")
    folder = RunFolder(source)
    model = build(parse_model(folder.read_config("model")["model"], folder.config))
    return Checkpoint(model, load_variables(folder, model), Tokenizer.load(folder.tokenizer))


def load_variables(folder: RunFolder, model) -> dict:
    """The parameters of the newest whole checkpoint, checked against the model's."""
    shapes = jax.eval_shape(lambda key: init(model, key), jax.random.key(0))
    _, params, _, _ = Checkpoints(folder.checkpoints).restore(shapes["params"])
    return {"params": params}
