"""Export of a model to a folder that transformers can load."""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.files import new_folder, write_json
from jaxformer.artifacts.saved import check_of_config, checked_params
from jaxformer.artifacts.tensors import flat, flat_shapes, write_tensors
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.hub.checkpoint_format import CheckpointFormat
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.generation import written_generation
from jaxformer.hub.table import entries
from jaxformer.hub.tokenizers.files import write_tokenizer
from jaxformer.models.config.model import CheckpointDType, ModelConfig
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.parameters import shape_tree
from jaxformer.terminal import with_article

# Some classes of transformers require parameters that a model may lack. These config changes add
# the parameters. Export fills the added parameters with zeros, so that the results do not change.
_BIASES = ("use_bias", "query_key_value_bias", "attention_output_bias", "feedforward_bias")
_ZEROS: tuple[dict[str, Any], ...] = (
    {"head_bias": True},
    {"num_token_types": 1},
    {"num_labels": 2},
    dict.fromkeys((*_BIASES, "norm_bias"), True),
)


def export(
    folder: str | Path,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None = None,
    *,
    model_type: str | None = None,
    dtype: str | None = None,
) -> str:
    """Writes a folder that transformers loads as an equivalent model.

    The folder contains config.json, generation_config.json, model.safetensors and the tokenizer's
    files. If the tokenizer came from a folder of transformers, its settings files, such as the chat
    template, are written too.

    Args:
        folder: The folder to create.
        model: The model.
        variables: The model's variables.
        tokenizer: The model's tokenizer, or None.
        model_type: A model_type of transformers. Defaults to the model's original family
            (`model.model_type`), or to the first family that can represent the model.
        dtype: dtype of the tensors, one of `CheckpointDType`. Defaults to the dtype of the original
            checkpoint (`model.checkpoint_dtype`), or to the dtype of the variables.

    Returns:
        The name of the class in transformers.

    Raises:
        ValueError: No family can represent the model, the folder exists, the variables do not
            fit the model, or a value exceeds the range of the dtype.
    """
    accepted = get_args(CheckpointDType)
    if dtype not in (None, *accepted):
        raise ValueError(f"dtype is {dtype!r}; it must be {', '.join(map(repr, accepted))} or None")
    check_of_config(model)
    params = checked_params(model, variables)
    matching, config, options = counterpart(model.config, preferred(model_type, model.model_type))
    leaves = with_zeros(params, config)
    wanted = entries(matching.rows(config), config, {name: x.shape for name, x in leaves.items()})
    with new_folder(folder) as unfinished:
        ids = write_tokenizer(unfinished, tokenizer, config)
        generation = written_generation(model.generation)
        if tokenizer is None:
            ids |= {name: generation[name] for name in ids.keys() & generation.keys()}
        written = jnp.dtype(
            dtype or model.checkpoint_dtype or jax.tree.leaves(params)[0].dtype.name
        )
        write_json(unfinished / "config.json", {**ids, **options, "dtype": written.name})
        write_json(unfinished / "generation_config.json", generation | ids)
        tensors = {entry.theirs: partial(entry.to_theirs, leaves) for entry in wanted}
        shapes = {entry.theirs: entry.their_shape for entry in wanted}
        for name, constant in matching.constants(config).items():
            if constant.is_saved:
                tensors[name] = partial(constant.array, constant.shape)
                shapes[name] = constant.shape
        converted = {name: partial(_converted, name, x, written) for name, x in tensors.items()}
        sizes = {name: written.itemsize * math.prod(shape) for name, shape in shapes.items()}
        write_tensors(unfinished, converted, sizes)
    return options["architectures"][0]


def _converted(name: str, make: Callable[[], np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Converts a tensor to `dtype`; raises ValueError if a value exceeds the range of `dtype`."""
    tensor = make()
    with np.errstate(over="ignore"):
        converted = tensor.astype(dtype)
    if dtype.name == "float16" and not np.array_equal(np.isinf(tensor), np.isinf(converted)):
        raise ValueError(
            f"tensor {name} has values beyond the range of float16; export the model with dtype "
            "'bfloat16' or 'float32'"
        )
    return converted


def preferred(
    model_type: str | None, origin: str | None, names: Collection[str] = FAMILIES
) -> list[CheckpointFormat]:
    """Returns the candidate families for an export, in order of preference.

    Args:
        model_type: The only candidate. If None, all of `names` are candidates.
        origin: The model's original family, which is the first candidate.
        names: The supported families.

    Raises:
        ValueError: `model_type` is not in `names`.
    """
    if model_type is None:
        return [FAMILIES[name] for name in sorted(names, key=lambda name: name != origin)]
    if model_type not in names:
        raise ValueError(f"model_type is {model_type!r}; it must be one of {', '.join(names)}")
    return [FAMILIES[model_type]]


def counterpart(
    config: ModelConfig, families: Iterable[CheckpointFormat]
) -> tuple[CheckpointFormat, TransformerConfig, dict]:
    """Finds the first family that can represent a model.

    The function prefers the first class of a family, which computes logits, to a class that returns
    only hidden states, even if the first class needs additional parameters.

    Args:
        config: The model's config.
        families: The candidate families, in order of preference.

    Returns:
        The family, the config and the options for config.json. The config may have additional
        parameters, whose values are zero.

    Raises:
        ValueError: None of the families can represent the model.
    """
    families = list(families)
    suitable = [
        checkpoint_format
        for checkpoint_format in families
        if checkpoint_format.config is type(config)
    ]
    if not suitable or not isinstance(config, TransformerConfig):
        raise ValueError(_no_class(config, families))
    bare, reasons = None, {}
    for candidate, checkpoint_format in product(_with_zeros(config), suitable):
        try:
            options = checkpoint_format.to_options(candidate)
        except ValueError as error:
            reasons.setdefault(checkpoint_format.model_type, str(error))
            continue
        if options["architectures"] == [next(iter(checkpoint_format.architectures))]:
            return checkpoint_format, candidate, options
        bare = bare or (checkpoint_format, candidate, options)
    if bare:
        return bare
    nearest = min(reasons, key=lambda name: (reasons[name].count(";"), len(reasons[name])))
    if len(suitable) == 1:
        raise ValueError(f"the family {nearest} cannot represent this model: {reasons[nearest]}")
    raise ValueError(
        f"no family of transformers can represent this model; the closest is {nearest}: "
        f"{reasons[nearest]}"
    )


def _no_class(config: ModelConfig, families: list[CheckpointFormat]) -> str:
    """Returns the error message for a config class that no candidate family supports."""
    name = type(config).__name__
    if any(checkpoint_format.config is type(config) for checkpoint_format in FAMILIES.values()):
        return (
            f"model_type is {families[0].model_type!r}, but this family has no models with {name}"
        )
    return (
        f"transformers has no counterpart of {with_article(name)}, so this model cannot be exported"
    )


def _with_zeros(config: TransformerConfig) -> Iterator[TransformerConfig]:
    """Yields the config, then variants with additional parameters, whose values are zero.

    Variants with fewer additional parameters come first.
    """
    has = {field.name for field in fields(config)}
    missing = [
        part for part in _ZEROS if has >= set(part) and not all(getattr(config, x) for x in part)
    ]
    for number in range(len(missing) + 1):
        for added in combinations(missing, number):
            try:
                yield replace(config, **ChainMap(*added)) if added else config
            except ValueError:
                continue  # The config rejects this combination of fields.


def with_zeros(params: dict, config: TransformerConfig) -> dict:
    """Returns the parameters by path, and zeros for the parameters that `config` adds."""
    leaves = flat(params)
    shapes = flat_shapes(shape_tree(build(config))).items()
    return {name: leaves.get(name, np.zeros(shape, np.float32)) for name, shape in shapes}
