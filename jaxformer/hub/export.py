"""Export of a model to a folder that transformers opens as the matching class."""

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
from jaxformer.artifacts.saved import check_layers_of_config, checked_params
from jaxformer.artifacts.tensors import flat, flat_shapes, write_tensors
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.family import Family
from jaxformer.hub.generation import written_generation
from jaxformer.hub.table import entries
from jaxformer.hub.tokenizers.files import write_tokenizer
from jaxformer.models.config.model import CheckpointDType, ModelConfig
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.parameters import shape_tree

# Parameters that a class of transformers may need and our model may lack, as changes to our config.
# They are exported as zeros, which change no result.
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
    family: str | None = None,
    dtype: str | None = None,
) -> str:
    """Writes a folder that transformers opens as the matching class.

    The folder holds config.json, generation_config.json, model.safetensors and the tokenizer's
    files. A tokenizer that was read from a folder of transformers keeps its settings there, such as
    its chat template.

    Args:
        folder: The folder to create.
        model: The model.
        variables: Its variables.
        tokenizer: Its tokenizer, if it has one.
        family: A model_type of transformers. None: the family that the model came from
            (`model.family`) or, if that family has no such model, the first family that has one.
        dtype: dtype of the tensors, one of `CheckpointDType`. None: the dtype of the checkpoint
            that the model came from (`model.checkpoint_dtype`) or, without one, of the variables.

    Returns:
        The name of the class in transformers.

    Raises:
        ValueError: If no family has such a model, the folder exists, the variables do not fit the
            model, or a value exceeds the range of the dtype.
    """
    accepted = get_args(CheckpointDType)
    if dtype not in (None, *accepted):
        raise ValueError(f"dtype is {dtype!r}; it must be {', '.join(map(repr, accepted))} or None")
    params = checked_params(model, variables)
    check_layers_of_config(model)
    matching, config, options = counterpart(model.config, preferred(family, model.family))
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
    """Returns a tensor in another dtype; raises ValueError if a value exceeds the dtype's range."""
    tensor = make()
    with np.errstate(over="ignore"):
        converted = tensor.astype(dtype)
    if dtype.name == "float16" and not np.array_equal(np.isinf(tensor), np.isinf(converted)):
        raise ValueError(
            f"tensor {name} has values beyond the range of float16; export it with dtype "
            "'bfloat16' or 'float32'"
        )
    return converted


def preferred(
    family: str | None, origin: str | None, names: Collection[str] = FAMILIES
) -> list[Family]:
    """Returns the families to export as, in the order in which they are tried.

    Args:
        family: The only one; None: all of `names`.
        origin: The family that the model came from, which is tried first.
        names: The names to choose from.

    Raises:
        ValueError: If `family` is none of the names.
    """
    if family is None:
        return [FAMILIES[name] for name in sorted(names, key=lambda name: name != origin)]
    if family not in names:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(names)}")
    return [FAMILIES[family]]


def counterpart(
    config: ModelConfig, families: Iterable[Family]
) -> tuple[Family, TransformerConfig, dict]:
    """Finds the first family that has this model.

    A class that computes logits (the first class of its family) is preferred to a bare class, even
    if only the former needs parameters of zeros.

    Args:
        config: Our config.
        families: The families to try, in this order.

    Returns:
        The family, our config (possibly with added parameters of zeros), and the options of their
        config.json.

    Raises:
        ValueError: If none of the families has such a model.
    """
    families = list(families)
    suitable = [family for family in families if family.config is type(config)]
    if not suitable or not isinstance(config, TransformerConfig):
        raise ValueError(_no_class(config, families))
    bare, reasons = None, {}
    for candidate, family in product(_with_zeros(config), suitable):
        try:
            options = family.to_options(candidate)
        except ValueError as error:
            reasons.setdefault(family.model_type, str(error))
            continue
        if options["architectures"] == [next(iter(family.architectures))]:
            return family, candidate, options
        bare = bare or (family, candidate, options)
    if bare:
        return bare
    nearest = min(reasons, key=lambda name: (reasons[name].count(";"), len(reasons[name])))
    if len(suitable) == 1:
        raise ValueError(f"{nearest} has no such model: {reasons[nearest]}")
    raise ValueError(
        f"transformers has no such model; the nearest is {nearest}: {reasons[nearest]}"
    )


def _no_class(config: ModelConfig, families: list[Family]) -> str:
    """Returns the message that none of the families has models of this kind."""
    name = type(config).__name__
    if any(family.config is type(config) for family in FAMILIES.values()):
        return f"family is {families[0].model_type!r}, which has no model with {name}"
    return f"transformers has no counterpart of a {name}, so this model cannot be exported"


def _with_zeros(config: TransformerConfig) -> Iterator[TransformerConfig]:
    """Yields the config, then variants with added parameters of zeros, those with few first."""
    has = {field.name for field in fields(config)}
    missing = [
        part for part in _ZEROS if has >= set(part) and not all(getattr(config, x) for x in part)
    ]
    for number in range(len(missing) + 1):
        for added in combinations(missing, number):
            try:
                yield replace(config, **ChainMap(*added)) if added else config
            except ValueError:
                continue  # these parts exclude one another


def with_zeros(params: dict, config: TransformerConfig) -> dict:
    """Returns the parameters by path, with zeros for those that only `config` has."""
    leaves = flat(params)
    shapes = flat_shapes(shape_tree(build(config))).items()
    return {name: leaves.get(name, np.zeros(shape, np.float32)) for name, shape in shapes}
