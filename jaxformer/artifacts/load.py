"""From a folder in our own format, a training run or what `save` wrote, to what is in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.artifacts.saved import read_saved, read_sections
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.build import shape_tree


class Checkpoint(NamedTuple):
    """A model, its variables and its tokenizer, None where there is none."""

    model: Any
    variables: dict
    tokenizer: Tokenizer | None


class Stored(NamedTuple):
    """What a folder holds. read(model) gives its parameters, checked against the model's."""

    config: Any
    read: Callable[[Any], dict]
    tokenizer: Any


def own_folder(folder: Path, dtype: str | None = None) -> Stored | None:
    """What a folder of ours holds, None if it is of another format.

    Of a run: its newest whole checkpoint; a warning if newer ones are damaged. dtype: of the
    parameters; None: as they are. ValueError if it holds nothing whole, or if its parameters are
    not those of its config.
    """
    sections = read_sections(folder)
    if sections is None:
        return None
    run = RunFolder(folder)
    if not run.checkpoints.is_dir():
        return Stored(*read_saved(folder, sections, dtype))

    def read(model):
        params = load_variables(run, model)["params"]
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    return Stored(parse_kind(sections, run.config), read, Tokenizer.load(run.tokenizer))


def load_variables(folder: RunFolder, model) -> dict:
    """The parameters of the newest whole checkpoint, checked against the model's."""
    from jaxformer.artifacts.checkpoint import Checkpoints  # Orbax takes 0.2 s to import

    _, params, _, _ = Checkpoints(folder.checkpoints).restore(shape_tree(model))
    return {"params": params}
