"""Reader of folders in jaxformer's own format: training runs and folders that `save` wrote."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.artifacts.run import RunFolder, parse_config, parse_generation, parse_kind
from jaxformer.artifacts.saved import read_saved, stored_tokenizer
from jaxformer.artifacts.tokenizer import Tokenizer, opening_texts
from jaxformer.decoding.autoregressive import prepare
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel, Variables


class Checkpoint(NamedTuple):
    """A model, its variables and its tokenizer, or None if it has no tokenizer."""

    model: LanguageModel
    variables: dict
    tokenizer: Tokenizer | None

    def prepared(self) -> Variables:
        """Returns the variables packed for decoding; call it once and generate many times."""
        return prepare(self.model, self.variables)


class Stored(NamedTuple):
    """Content of a folder in jaxformer's own format.

    Attributes:
        config: The model's config.
        read: Reads the parameters. Its argument is a tree of the model's shapes, which may hold
            shardings (`models.mesh.parameter_shapes`). The stored shapes are checked against
            it.
        tokenizer: The tokenizer, or None.
        family: The model_type of transformers that the weights came from, or None.
        generation: The checkpoint's settings for generation.
        checkpoint_dtype: The dtype of that checkpoint's tensors, or None.
        layers: The layers that the caller defined, as JSON (`artifacts.values`), or None.
    """

    config: ModelConfig
    read: Callable[[Any], dict]
    tokenizer: Tokenizer | None
    family: str | None = None
    generation: GenerationDefaults = GenerationDefaults()
    checkpoint_dtype: str | None = None
    layers: Any = None


def own_folder(folder: Path, sections: dict, dtype: str | None = None) -> Stored:
    """Opens a folder in jaxformer's own format.

    For a run, the parameters are those of its newest undamaged checkpoint, with a warning if newer
    ones are damaged.

    Args:
        folder: A run or a saved folder.
        sections: The sections of its config.json.
        dtype: dtype of the parameters; None: as stored.

    Raises:
        ValueError: If the folder has no undamaged checkpoint, or its parameters do not fit its
            config.
    """
    run = RunFolder(folder)
    if run.checkpoints.is_dir():
        return stored_run(run, sections, partial(newest_params, run), dtype)
    config, generation = parse_kind(sections, run.config), parse_generation(sections, run.config)
    read, tokenizer = partial(read_saved, folder, dtype), stored_tokenizer(folder, sections)
    about = (sections.get("family"), generation, sections.get("checkpoint_dtype"))
    return Stored(config, read, tokenizer, *about, sections.get("layers"))


def stored_run(
    run: RunFolder, sections: dict, read: Callable[[Any], dict], dtype: str | None
) -> Stored:
    """Returns the content of a run.

    Args:
        run: The run.
        sections: The sections of its config.json.
        read: Reads its parameters, as in `Stored`, with the dtypes of the checkpoint.
        dtype: dtype of the parameters; None: as stored.
    """

    def read_converted(like: dict) -> dict:
        params = read(like)
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    config, generation = parse_kind(sections, run.config), parse_generation(sections, run.config)
    about = (sections.get("family"), generation, sections.get("checkpoint_dtype"))
    is_of_script = "objective" in sections  # its user may have put a tokenizer into its folder
    tokenizer = stored_tokenizer(run.path, sections) if is_of_script else run_tokenizer(run)
    return Stored(config, read_converted, tokenizer, *about)


def newest_params(run: RunFolder, like: dict) -> dict:
    """Returns the trained parameters of the newest undamaged checkpoint of a run.

    If the run maintains a moving average of its weights, the average is returned.

    Raises:
        ValueError: If the stored tree, shapes or dtypes differ from `like`.
    """
    from jaxformer.artifacts.checkpoint import Checkpoints  # Orbax takes 0.2 s to import

    return Checkpoints(run.checkpoints).restore(like)[1]


def run_tokenizer(run: RunFolder) -> Tokenizer:
    """Returns the tokenizer of a run, which begins texts as the run's training.

    Raises:
        ValueError: If the run has no tokenizer, or its config is wrong.
    """
    sections = run.read_config() if run.holds_run else {}
    tokenizer = stored_tokenizer(run.path, sections)
    if tokenizer is None:
        raise ValueError(f"{run.tokenizer} does not exist")
    return opening_texts(tokenizer)


def lora_of(sections: dict, where: Path) -> LoraConfig:
    """Returns the LoRA settings of a run; without such a section, those of a run without adapter.

    Args:
        sections: The sections of config.json.
        where: The path of config.json, for error messages.
    """
    return parse_config(LoraConfig, sections.get("training", {}).get("lora", {}), where)
