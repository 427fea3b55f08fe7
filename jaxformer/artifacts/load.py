"""From a folder in our own format, a training run or what `save` wrote, to what is in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.artifacts.lowercase import lowercased
from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind
from jaxformer.artifacts.saved import read_saved, read_sections, stored_tokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.config.lora import LoraConfig


class Checkpoint(NamedTuple):
    """A model, its variables and its tokenizer, None where there is none."""

    model: Any
    variables: dict
    tokenizer: Tokenizer | None


class Stored(NamedTuple):
    """What a folder holds. read(like) gives its parameters, checked against those of the model:
    shapes, which may say where each is to live (`models.placement.parameter_shapes`)."""

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

    def read(like):
        params = newest_params(run, like)
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    return Stored(parse_kind(sections, run.config), read, run_tokenizer(run))


def newest_params(run: RunFolder, like) -> dict:
    """What is learnt, as the newest whole checkpoint has it; ValueError if it is not like that.

    Of a run that keeps a moving average of its weights it is the average.
    """
    from jaxformer.artifacts.checkpoint import Checkpoints  # Orbax takes 0.2 s to import

    return Checkpoints(run.checkpoints).restore(like)[1]


def run_tokenizer(run: RunFolder) -> Tokenizer | Subwords:
    """The tokenizer of a run: its own, or that of the checkpoint which it began from."""
    sections = run.read_config() if run.holds_run else {}
    tokenizer = stored_tokenizer(run.path, sections)
    if tokenizer is None:
        raise ValueError(f"{run.tokenizer} is not there")
    training = sections.get("training")
    lowercase = isinstance(training, dict) and training.get("lowercase")
    return lowercased(tokenizer) if lowercase else tokenizer  # an earlier version's file has it not


def lora_of(sections: dict, where) -> LoraConfig:
    """What the config.json of a run says of an adapter; of a saved folder, that there is none."""
    training = sections.get("training")
    found = training.get("lora") if isinstance(training, dict) else None
    return LoraConfig() if found is None else parse_config(LoraConfig, found, where)
