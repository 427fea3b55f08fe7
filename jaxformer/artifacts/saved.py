"""Models in jaxformer's own format: folders that `save` writes, and training runs.

A saved folder holds config.json (the model's kind and the version of the format), model.safetensors
and, if the model has a tokenizer, tokenizer.json. If that came from a folder of transformers, its
settings files are beside it.
"""

from collections.abc import Callable, Iterator
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
    stored_tensors,
    write_tensors,
)
from jaxformer.artifacts.tokenizer import (
    AnyTokenizer,
    SpecialTokens,
    Tokenizer,
    bind,
    opening_texts,
    parsing_special,
)
from jaxformer.artifacts.values import to_json
from jaxformer.decoding.autoregressive import prepare
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.linear.low_rank import is_low_rank
from jaxformer.models.config import Execution, kind_of
from jaxformer.models.config.check import shown
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables

_LIBRARIES = ("jaxformer", "flax", "dataclasses")  # dataclasses writes __replace__
# Fields of a model that are saved or do not change its results.
_RESTORED = {
    *("config", "execution", "layers", "family", "generation", "checkpoint_dtype"),
    *("parent", "name"),
}


class Checkpoint(NamedTuple):
    """A model, its variables and its tokenizer, which is None if the folder has none."""

    model: LanguageModel
    variables: dict
    tokenizer: Tokenizer | None

    def prepared(self) -> Variables:
        """Returns the variables packed for decoding; call it once and generate many times."""
        return prepare(self.model, self.variables)


class Stored(NamedTuple):
    """Content of a folder whose parameters are not read yet.

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


def save(
    folder: str | Path,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
) -> None:
    """Writes a model into a new folder, from which `load` reads it.

    Args:
        folder: A folder that does not exist yet, or is empty.
        model: One of jaxformer's models. Its config is saved, its execution is not.
        variables: Its variables, `{"params": …}`.
        tokenizer: Its tokenizer, or None.
        family: The model_type of transformers that the weights came from; None: `model.family`.

    Raises:
        ValueError: If the folder is not empty, the variables do not fit the model, or the model has
            something that its files cannot hold, such as a mask.
    """
    leaves = flat(checked_params(model, variables))
    special = None if tokenizer is None else tokenizer.special
    with new_folder(folder) as unfinished:
        kind = kind_of(model.config)
        content = {"format": RUN_FORMAT, "kind": kind, "model": asdict(model.config)}
        if model.layers is not None:
            content["layers"] = to_json(model.layers, "layers")
        ids = None if special is None else asdict(special)
        about = (family or model.family, model.generation, ids, model.checkpoint_dtype)
        content |= source_sections(*about)
        if tokenizer is not None and tokenizer.parses_special:
            content["parse_special"] = True
        write_json(unfinished / "config.json", content)
        tensors = {name: lambda leaf=leaf: np.asarray(leaf) for name, leaf in leaves.items()}
        write_tensors(unfinished, tensors, {name: x.nbytes for name, x in leaves.items()})
        if tokenizer is not None:
            tokenizer.save(unfinished / "tokenizer.json")


def check_layers_of_config(model: LanguageModel) -> None:
    """Raises ValueError if the model has layers that its config does not describe."""
    if model.layers is not None:
        raise ValueError(
            "layers were given to the model; only jaxformer's own format can hold them (jf.save)"
        )


def checked_params(model: LanguageModel, variables: Variables) -> dict:
    """Returns the parameters of `variables`, checked against the model.

    Raises:
        ValueError: If they do not fit the model, are quantized or packed, or if the model has
            something that its files cannot hold.
    """
    check_restorable(model)
    if any(is_low_rank(x) for x in jax.tree.leaves(variables, is_leaf=is_low_rank)):
        raise ValueError(
            "variables hold a LoRA adapter beside the base weights; pass "
            "jf.merge_adapter(variables)"
        )
    if any(is_kernel(x) for x in jax.tree.leaves(variables, is_leaf=is_kernel)):
        raise ValueError("variables hold integers or packed kernels; pass the original params")
    model.check(variables)
    return variables["params"]


def own_folder(
    folder: Path,
    sections: dict,
    dtype: str | None = None,
    read: Callable[[dict], dict] | None = None,
) -> Stored:
    """Opens a folder in jaxformer's own format.

    For a run, the parameters are those of its newest undamaged checkpoint, with a warning if newer
    ones are damaged.

    Args:
        folder: A run or a saved folder.
        sections: The sections of its config.json.
        dtype: dtype of the parameters; None: as stored.
        read: Reads the parameters of a run whose checkpoints hold an adapter only, with the dtypes
            of the checkpoints; None: the folder holds all parameters.

    Raises:
        ValueError: If the folder has no undamaged checkpoint, or its parameters do not fit its
            config.
    """
    run = RunFolder(folder)
    is_run = read is not None or run.checkpoints.is_dir()
    read_run = read or partial(newest_params, run)

    def read_converted(like: dict) -> dict:
        params = read_run(like)
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    # The user of a script may have put a tokenizer into the folder of its run.
    is_trained = is_run and "objective" not in sections
    return Stored(
        parse_kind(sections, run.config),
        read_converted if is_run else partial(read_saved, folder, dtype),
        run_tokenizer(run) if is_trained else stored_tokenizer(folder, sections),
        sections.get("family"),
        parse_generation(sections, run.config),
        sections.get("checkpoint_dtype"),
        sections.get("layers"),
    )


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


def read_saved(folder: Path, dtype: str | None, like: dict) -> dict:
    """Reads the parameters of a folder that `save` wrote.

    Args:
        folder: The folder.
        dtype: dtype of the parameters; None: as stored.
        like: A tree of the model's shapes, which may hold shardings.
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
        return name, jax.device_put(arrays.pop(name), leaves[name].sharding)

    return filled(like, dict(in_threads(leaf, leaves, lambda x: leaves[x].size)))


def stored_tokenizer(folder: Path, sections: dict) -> Tokenizer | None:
    """Reads the tokenizer of a folder in jaxformer's format, with the model's limit of ids.

    Args:
      folder: A run or a saved folder.
      sections: The sections of its config.json.

    Returns:
      The tokenizer, or None if the folder has none.
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
    """Returns whether spelled-out special tokens are tokens in this run or saved folder."""
    chosen = sections.get("training", {}).get("parse_special", sections.get("parse_special", False))
    if type(chosen) is not bool:
        raise ValueError(f"{where}: parse_special is {shown(chosen)}; it must be true or false")
    return chosen


def bound(tokenizer: AnyTokenizer, config: ModelConfig, path: Path) -> AnyTokenizer:
    """Sets the limit of ids of a tokenizer; an error names the tokenizer's file."""
    sizes = (config.vocab_size, getattr(config, "source_vocab_size", None) or config.vocab_size)
    try:
        return bind(tokenizer, min(sizes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_restorable(model: LanguageModel) -> None:
    """Checks that a saved copy of `model` would give the same results.

    Loading rebuilds a model from its config and its parameters, so anything else that changes its
    results would be lost.

    Raises:
        ValueError: If something would be lost: a mask, another field of the module, a subclass, or
            a function that replaces one of the library's. The message names it.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(f"model is a {type(model).__name__}; it must be one of jaxformer's models")
    plain = build(model.config)
    if type(model) is not type(plain):
        kind = type(plain).__name__
        raise _lost("model", f"a {type(model).__name__}", f"{kind}(model.config)")
    if type(model.execution) is not Execution:
        raise _lost("execution", f"a {type(model.execution).__name__}", "an Execution")
    for name in sorted(model.__dataclass_fields__.keys() - _RESTORED):
        given, default = getattr(model, name), getattr(plain, name)
        if given is default or (name == "mask" and _has_equal_masks(model, plain)):
            continue
        raise _lost(name, shown(given), f"{name}={shown(default)}")
    for name in _replaced(model):
        raise _lost(name, "a function of yours", "the library's function")


def _lost(name: str, given: str, plain: str) -> ValueError:
    return ValueError(
        f"{name} is {given}, which the files of a model cannot hold: a model loaded from them "
        f"would have {plain} and give other results. Pass a model with {plain}, and set yours "
        "again after loading"
    )


def _replaced(model: LanguageModel) -> Iterator[str]:
    """Yields the names of the library's functions that the caller has replaced on the model."""
    known = {*model.__dataclass_fields__, *vars(build(model.config)), "scope"}
    yield from (name for name in vars(model) if name not in known)
    classes = [kind for kind in type(model).__mro__ if kind.__module__.startswith("jaxformer.")]
    for owner in classes:
        for name, value in vars(owner).items():
            plain = value.fget if isinstance(value, property) else value
            function = getattr(plain, "__func__", plain)  # of a static method
            function = getattr(function, "__wrapped__", function)  # of a cached one
            if isfunction(function) and not function.__module__.startswith(_LIBRARIES):
                yield name


def _has_equal_masks(model: LanguageModel, other: LanguageModel) -> bool:
    try:
        return bool(model.masks == other.masks)
    except ValueError:  # a mask holds an array, and the truth value of its comparison is ambiguous
        return False
