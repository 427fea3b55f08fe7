"""From a model to a folder that transformers opens as the matching class."""

from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.saved import checked_params, flat, flat_shapes
from jaxformer.artifacts.table import Entry, entries
from jaxformer.artifacts.tensors import new_folder, write_json, write_tensors
from jaxformer.artifacts.tokenizer_files import write_tokenizer
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.family import Family
from jaxformer.models.build import build, shape_tree

# Parts that a class of theirs may ask for, and that change nothing while they are zeros.
_ZEROS = (("head_bias", True), ("num_token_types", 1), ("num_labels", 2))


def export(folder, model, variables, tokenizer=None, *, family: str | None = None) -> str:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into a
    new folder. Returns the name of the class of theirs. family: a model_type of theirs; None: the
    first one in which such a model can be.

    ValueError if they have no such model, with what differs from the nearest one, if the folder
    holds something, or if the variables are not this model's.
    """
    params = checked_params(model, variables)
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(FAMILIES)}")
    families = FAMILIES.values() if family is None else [FAMILIES[family]]
    family, config, options = counterpart(model.config, families)
    leaves = with_zeros(params, config)
    wanted = entries(family.rows(config), config, {name: x.shape for name, x in leaves.items()})
    with new_folder(folder) as unfinished:
        settings = write_tokenizer(unfinished, tokenizer, config)
        dtype = str(jax.tree.leaves(params)[0].dtype)
        content = {**settings, **options, "dtype": dtype}
        write_json(unfinished / "config.json", content)
        write_json(unfinished / "generation_config.json", settings)
        tensors = {entry.theirs: lambda entry=entry: of_entry(entry, leaves) for entry in wanted}
        itemsize = jnp.dtype(dtype).itemsize
        sizes = {x.theirs: itemsize * int(np.prod(x.their_shape)) for x in wanted}
        write_tensors(unfinished, tensors, sizes)
    return options["architectures"][0]


def of_entry(entry: Entry, leaves: dict):
    """A tensor of theirs from ours."""
    arrays = [np.asarray(leaves[name]) for name in entry.ours]
    if entry.layer is not None:
        arrays = [array[entry.layer] for array in arrays]
    return entry.to_theirs(arrays)


def counterpart(config, families) -> tuple[Family, object, dict]:
    """(their family, our config with parts of zeros if it asks for those, their options)."""
    families = [family for family in families if family.config is type(config)]
    if not families:
        raise ValueError(f"transformers has no counterpart of a {type(config).__name__} here")
    missing = [(name, x) for name, x in _ZEROS if not getattr(config, name, True)]
    reasons = {}
    for number in range(len(missing) + 1):
        for added in combinations(missing, number):
            candidate = replace(config, **dict(added)) if added else config
            for family in families:
                try:
                    return family, candidate, family.to_options(candidate)
                except ValueError as error:
                    reasons.setdefault(family.model_type, str(error))
    nearest = min(reasons, key=lambda name: (reasons[name].count(";"), len(reasons[name])))
    raise ValueError(
        f"transformers has no such model; the nearest is {nearest}: {reasons[nearest]}"
    )


def with_zeros(params: dict, config) -> dict:
    """The parameters by their path, with zeros for those that the config has besides."""
    leaves = flat(params)
    shapes = flat_shapes(shape_tree(build(config))).items()
    return {name: leaves.get(name, np.zeros(shape, np.float32)) for name, shape in shapes}
