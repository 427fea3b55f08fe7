"""Models in jaxformer's own format: folders that `save` writes, and training runs.

The folder of a saved model contains config.json (the model's config and the version of the format),
model.safetensors and, if the model has a tokenizer, tokenizer.json. If the tokenizer came from a
folder of transformers, the folder also contains the tokenizer's settings files.

If the caller built the model with a custom mask or custom layers, config.json also stores the mask
and the layers. `artifacts.values` stores the caller's classes and functions by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.files import new_folder, write_json
from jaxformer.artifacts.run import (
    RUN_FORMAT,
    RunFolder,
    parse_config,
    parse_generation,
    parse_kind,
    source_sections,
)
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tensors import (
    DTYPES,
    empty,
    filled,
    flat,
    in_threads,
    place_array,
    stored_tensors,
    write_tensors,
)
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_copies import AnyTokenizer, bind, opening_texts, parsing_special
from jaxformer.artifacts.values import to_json
from jaxformer.decoding.autoregressive import pack_weights
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.linear.low_rank import is_low_rank
from jaxformer.models.config import Execution, architecture_name
from jaxformer.models.config.check import shown
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.terminal import kind_of

# The packages that define the methods of jaxformer's models. The module dataclasses generates
# __replace__.
_LIBRARIES = ("jaxformer", "flax", "dataclasses")
# The fields of a model that are saved, or that do not affect its results.
_RESTORED = {
    *("config", "execution", "mask", "layers", "activation", "positions"),
    *("model_type", "generation", "checkpoint_dtype"),
    *("parent", "name"),
}
# The fields of a model that affect its results but are not part of its config.
OWN = ("mask", "layers", "activation", "positions")


class Checkpoint(NamedTuple):
    """A model, its variables, and its tokenizer or None."""

    model: LanguageModel
    variables: dict
    tokenizer: Tokenizer | None

    def packed(self) -> Variables:
        """Packs the variables for decoding; call this once before repeated generation."""
        return pack_weights(self.model, self.variables)


class Stored(NamedTuple):
    """Content of a model's folder, before its parameters are read.

    Attributes:
        config: The model's config.
        read: Function that reads the parameters. The function takes the tree of expected shapes,
            with or without shardings (`models.sharding.parameters.parameter_shapes`).
        tokenizer: The tokenizer, or None.
        model_type: The imported checkpoint's model_type in transformers, or None.
        generation: The checkpoint's settings for generation.
        checkpoint_dtype: The dtype of the checkpoint's tensors, or None.
        own: The model's custom mask and layers as JSON data, from `own_values`.
    """

    config: ModelConfig
    read: Callable[[Any], dict]
    tokenizer: Tokenizer | None
    model_type: str | None = None
    generation: GenerationDefaults = GenerationDefaults()
    checkpoint_dtype: str | None = None
    own: Mapping[str, Any] = {}


def save(
    folder: str | Path,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None = None,
    *,
    model_type: str | None = None,
) -> None:
    """Writes a model into a new folder, from which `load` reads it.

    Args:
        folder: A folder that does not exist yet, or is empty.
        model: One of jaxformer's models. The model's config is saved, but its execution settings
            are not.
        variables: The model's variables, `{"params": …}`.
        tokenizer: The model's tokenizer, or None.
        model_type: The imported checkpoint's model_type in transformers. Defaults to
            `model.model_type`.

    Raises:
        ValueError: The folder is not empty, the variables do not fit the model, or a part of the
            model cannot be stored, such as an activation that is a lambda.
    """
    check_restorable(model)
    own, leaves = own_values(model), flat(checked_params(model, variables))
    special = None if tokenizer is None else tokenizer.special
    with new_folder(folder) as unfinished:
        kind = architecture_name(model.config)
        content = {"format": RUN_FORMAT, "kind": kind, "model": asdict(model.config), **own}
        ids = None if special is None else asdict(special)
        about = (model_type or model.model_type, model.generation, ids, model.checkpoint_dtype)
        content |= source_sections(*about)
        if tokenizer is not None and tokenizer.parses_special:
            content["parse_special"] = True
        write_json(unfinished / "config.json", content)
        tensors = {name: lambda leaf=leaf: np.asarray(leaf) for name, leaf in leaves.items()}
        write_tensors(unfinished, tensors, {name: x.nbytes for name, x in leaves.items()})
        if tokenizer is not None:
            tokenizer.save(unfinished / "tokenizer.json")


def own_values(model: LanguageModel) -> dict[str, Any]:
    """Returns the model's custom mask and layers as JSON data, by field name.

    Raises:
        ValueError: The mask or a layer contains a value that cannot be stored as JSON, such as an
            array or a lambda.
    """
    given = {name: getattr(model, name) for name in OWN}
    return {name: to_json(value, name) for name, value in given.items() if value is not None}


def check_of_config(model: LanguageModel) -> None:
    """Raises ValueError if the model has a custom mask or layers, which only `save` can store."""
    check_restorable(model)
    plain = build(model.config)
    for name in OWN:
        value = getattr(model, name)
        if value is not None and not (name == "mask" and _has_equal_masks(model, plain)):
            raise ValueError(
                f"{name} is {shown(value)}; only jaxformer's own format can store it (use jf.save)"
            )


def checked_params(model: LanguageModel, variables: Variables) -> dict:
    """Returns the parameters of `variables`, checked against the model.

    Raises:
        ValueError: The parameters do not fit the model, or are quantized or packed.
    """
    if any(is_low_rank(x) for x in jax.tree.leaves(variables, is_leaf=is_low_rank)):
        raise ValueError(
            "variables contains a LoRA adapter beside the base weights; pass "
            "jf.merge_adapter(variables)"
        )
    if any(is_kernel(x) for x in jax.tree.leaves(variables, is_leaf=is_kernel)):
        raise ValueError("variables contains quantized or packed kernels; pass the original params")
    model.check(variables)
    return variables["params"]


def own_folder(
    folder: Path,
    sections: dict,
    dtype: str | None = None,
    read: Callable[[dict], dict] | None = None,
) -> Stored:
    """Opens a folder in jaxformer's own format.

    For a run, the parameters come from its newest undamaged checkpoint. If newer checkpoints are
    damaged, a warning is issued.

    Args:
        folder: A run, or a folder that `save` wrote.
        sections: The sections of the folder's config.json.
        dtype: dtype of the parameters. Defaults to the stored dtype.
        read: The function that reads the parameters of a run whose checkpoints contain only an
            adapter. If None, the folder contains all parameters.

    Raises:
        ValueError: The folder has no undamaged checkpoint, or its parameters do not fit its config.
    """
    run = RunFolder(folder)
    is_run = read is not None or run.checkpoints.is_dir()
    read_run = read or partial(newest_params, run)

    def read_converted(like: dict) -> dict:
        params = read_run(like)
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    # A run of `training.fit` writes no tokenizer, but the user may have added one to its folder.
    is_trained = is_run and "objective" not in sections
    return Stored(
        parse_kind(sections, run.config),
        read_converted if is_run else partial(read_saved, folder, dtype),
        run_tokenizer(run) if is_trained else stored_tokenizer(folder, sections),
        sections.get("model_type"),
        parse_generation(sections, run.config),
        sections.get("checkpoint_dtype"),
        {name: sections[name] for name in OWN if name in sections},
    )


def newest_params(run: RunFolder, like: dict) -> dict:
    """Returns the trained parameters of the newest undamaged checkpoint of a run.

    If the run maintains a moving average of its weights, the average is returned.

    Raises:
        ValueError: The names, shapes or dtypes of the stored parameters differ from `like`.
    """
    # Importing Orbax takes 0.2 s, so it is imported only here.
    from jaxformer.artifacts.checkpoint import Checkpoints

    return Checkpoints(run.checkpoints).restore(like)[1]


def run_tokenizer(run: RunFolder) -> Tokenizer:
    """Returns the tokenizer of a run, which starts each text with the same ids as in training.

    Raises:
        ValueError: The run has no tokenizer, or its config is invalid.
    """
    sections = run.read_config() if run.holds_run else {}
    tokenizer = stored_tokenizer(run.path, sections)
    if tokenizer is None:
        raise ValueError(f"{run.tokenizer} does not exist")
    return opening_texts(tokenizer)


def read_lora(sections: dict, where: Path) -> LoraConfig:
    """Returns the LoRA settings in config.json, or the defaults (no adapter) if it has no settings.

    Args:
        sections: The sections of config.json.
        where: The path of config.json, for error messages.
    """
    return parse_config(LoraConfig, sections.get("training", {}).get("lora", {}), where)


def read_saved(folder: Path, dtype: str | None, like: dict) -> dict:
    """Reads the parameters of a folder that `save` wrote.

    Args:
        folder: The folder.
        dtype: dtype of the parameters. Defaults to the stored dtype.
        like: The tree of expected shapes, with or without shardings.
    """
    leaves, tensors = flat(like), stored_tensors(folder)
    for name in sorted(leaves.keys() ^ tensors.keys()):
        what = "is missing" if name in leaves else "is unknown in this model"
        raise ValueError(f"{folder}: tensor {name} {what}")
    for name, tensor in tensors.items():
        tensor.check(leaves[name].shape)
    arrays = {name: empty(x.shape, dtype or DTYPES[x.dtype]) for name, x in tensors.items()}

    def leaf(name: str) -> tuple[str, jax.Array]:
        tensors[name].read_into(arrays[name])
        return name, place_array(arrays.pop(name), leaves[name].sharding)

    return filled(like, dict(in_threads(leaf, leaves, lambda x: leaves[x].size)))


def stored_tokenizer(folder: Path, sections: dict) -> Tokenizer | None:
    """Reads the tokenizer of a folder in jaxformer's format and sets its `id_limit`.

    Args:
        folder: A run, or a folder that `save` wrote.
        sections: The sections of the folder's config.json.

    Returns:
        The tokenizer, or None if the folder has no tokenizer.json.
    """
    path, where = folder / "tokenizer.json", folder / "config.json"
    if not path.is_file():
        return None
    if "special_tokens" not in sections:
        tokenizer: Tokenizer = ByteTokenizer.load(path)
    else:
        special = parse_config(SpecialTokens, sections["special_tokens"], where)
        tokenizer = Subwords.load(path, special)
    tokenizer = parsing_special(tokenizer) if _parses_special(sections, where) else tokenizer
    return bound(tokenizer, parse_kind(sections, where), path) if "model" in sections else tokenizer


def _parses_special(sections: dict, where: Path) -> bool:
    """Returns parse_special: whether spelled-out special tokens are encoded as special tokens."""
    chosen = sections.get("training", {}).get("parse_special", sections.get("parse_special", False))
    if type(chosen) is not bool:
        raise ValueError(f"{where}: parse_special is {shown(chosen)}; it must be true or false")
    return chosen


def bound(tokenizer: AnyTokenizer, config: ModelConfig, path: Path) -> AnyTokenizer:
    """Sets the `id_limit` of a tokenizer; an error names the tokenizer's file."""
    sizes = (config.vocab_size, getattr(config, "source_vocab_size", None) or config.vocab_size)
    try:
        return bind(tokenizer, min(sizes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_restorable(model: LanguageModel) -> None:
    """Checks that a saved copy of `model` would give the same results.

    Loading rebuilds a model from the saved config, mask, layers and parameters. Changes to other
    fields or to methods would be lost.

    Raises:
        ValueError: The model is an instance of a subclass, a method was replaced, or a field that
            is not saved was changed. The message names the method or field.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(f"model is {kind_of(model)}; it must be one of jaxformer's models")
    plain = build(model.config)
    if type(model) is not type(plain):
        kind = type(plain).__name__
        raise _lost("model", kind_of(model), f"{kind}(model.config)")
    if type(model.execution) is not Execution:
        raise _lost("execution", kind_of(model.execution), "an Execution")
    for name in sorted(model.__dataclass_fields__.keys() - _RESTORED):
        given, default = getattr(model, name), getattr(plain, name)
        if given is not default:
            raise _lost(name, shown(given), f"{name}={shown(default)}")
    for name in _replaced(model):
        raise _lost(name, "a function from outside jaxformer", "jaxformer's function")


def _lost(name: str, given: str, plain: str) -> ValueError:
    return ValueError(
        f"{name} is {given}, which jf.save cannot store: the loaded model would have "
        f"{plain} and give other results. Save a model with {plain}, and set your value again "
        "after loading"
    )


def _replaced(model: LanguageModel) -> Iterator[str]:
    """Yields the names of the library's methods that the caller has replaced on the model."""
    known = {*model.__dataclass_fields__, *vars(build(model.config)), "scope"}
    yield from (name for name in vars(model) if name not in known)
    classes = [kind for kind in type(model).__mro__ if kind.__module__.startswith("jaxformer.")]
    for owner in classes:
        for name, value in vars(owner).items():
            plain = value.fget if isinstance(value, property) else value
            # Static methods and cached methods wrap a function.
            function = getattr(plain, "__func__", plain)
            function = getattr(function, "__wrapped__", function)
            if isfunction(function) and not function.__module__.startswith(_LIBRARIES):
                yield name


def _has_equal_masks(model: LanguageModel, other: LanguageModel) -> bool:
    try:
        return bool(model.masks == other.masks)
    except ValueError:  # Comparing masks that contain arrays raises ValueError.
        return False
