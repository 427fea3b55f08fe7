"""From a folder in Hugging Face's format to a model and its variables."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.hub.families import FAMILIES
from jaxformer.hub.family import Family
from jaxformer.hub.folder import DTYPES, opened, read_options, tensor_files
from jaxformer.hub.options import Options
from jaxformer.hub.table import Entry, entries, flat, unflat
from jaxformer.models.build import build, init


def family_of(options: Options) -> Family:
    """The family that config.json names; ValueError with those that there are."""
    name = options.take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"{options.file}: model_type is {name!r}; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def flat_shapes(model) -> dict:
    """The shapes of a model's parameters, by their path."""
    tree = jax.eval_shape(lambda key: init(model, key), jax.random.key(0))["params"]
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def load_folder(folder: Path, dtype="float32", place=jnp.asarray, **options):
    """(model, variables). place: what becomes of each whole array (sharding, for one)."""
    foreign = read_options(folder)
    family = family_of(foreign)  # before any tensor is looked at
    files = tensor_files(folder)
    foreign.tensors = files.keys()
    model = build(family.to_config(foreign), **options)
    return model, {"params": read_parameters(folder, files, family, model, dtype, place)}


def read_parameters(folder: Path, files: dict, family: Family, model, dtype, place) -> dict:
    """The parameters, one of ours at a time, so that no more than that is in memory twice."""
    shapes = flat_shapes(model)
    wanted = entries(family.rows(model.config), model.config, shapes)
    names = found_names(folder, family, wanted, files)
    by_leaf: dict[tuple, list[Entry]] = {}
    for entry in wanted:
        by_leaf.setdefault(entry.ours, []).append(entry)
    check_shapes(wanted, names, files)
    leaves = {}
    for ours, some in by_leaf.items():
        arrays = {name: np.ones(shapes[name], jnp.dtype(dtype)) for name in ours}
        for path in dict.fromkeys(files[names[entry.theirs]] for entry in some):
            with opened(path) as file:
                for entry in some:
                    if files[names[entry.theirs]] == path:
                        fill(arrays, entry, file.get_tensor(names[entry.theirs]))
        leaves |= {name: place(arrays.pop(name)) for name in ours}
    return unflat(leaves)


def fill(arrays: dict, entry: Entry, tensor):
    """Put a tensor of theirs where it belongs in ours."""
    for name, part in zip(entry.ours, entry.to_ours(tensor), strict=True):
        arrays[name][... if entry.layer is None else entry.layer] = part


def found_names(folder: Path, family: Family, wanted: list[Entry], files: dict) -> dict:
    """{name in the table: name in the file}; ValueError for what is missing or not asked for."""
    names = {family.newer(name): name for name in files}
    if family.base and not any(name.startswith(family.base) for name in names):
        names = {family.base + new: name for new, name in names.items()} | names
    expected = {entry.theirs for entry in wanted}
    missing = sorted(expected - names.keys())
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing{_and_more(missing)}")
    used = {names[name] for name in expected}
    unused = [name for name in files if name not in used and not family.is_ignored(name)]
    if unused:
        raise ValueError(
            f"{folder}: tensor {min(unused)} has no place in this model{_and_more(unused)}"
        )
    return {name: names[name] for name in expected}


def _and_more(names) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def check_shapes(wanted: list[Entry], names: dict, files: dict):
    """Refuse tensors of another shape or of a type that is none of floats, all at once."""
    by_file: dict[Path, list] = {}
    for entry in wanted:
        name = names[entry.theirs]
        by_file.setdefault(files[name], []).append((name, entry.their_shape))
    for path, tensors in by_file.items():
        with opened(path) as file:
            for name, shape in tensors:
                found = file.get_slice(name)
                if tuple(found.get_shape()) != shape:
                    raise ValueError(
                        f"{path}: tensor {name} is {tuple(found.get_shape())}; by config.json it "
                        f"must be {shape}"
                    )
                if found.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{path}: tensor {name} is {found.get_dtype()}; it must be one of "
                        f"{', '.join(DTYPES)}"
                    )
