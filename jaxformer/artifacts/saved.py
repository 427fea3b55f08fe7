"""Our own folder for a model: config.json (its kind and the format's version), model.safetensors,
and tokenizer.json if there is one."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from jaxformer.artifacts.run import parse_config, parse_kind
from jaxformer.artifacts.subwords import SpecialTokens, Subwords
from jaxformer.artifacts.tensors import (
    DTYPES,
    empty,
    in_threads,
    new_folder,
    read_json,
    stored_tensors,
    write_json,
    write_tensors,
)
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.kernels import is_kernel
from jaxformer.models.config import kind_of

FORMAT = 1


def save(folder, model, variables, tokenizer=None, *, family: str | None = None) -> None:
    """Write the model, its variables and its tokenizer into a new folder, from which `load` reads
    them. family: of transformers, from which it was imported.

    ValueError if there is something already, or if the variables are not this model's.
    """
    params = checked_params(model, variables)
    with new_folder(folder) as unfinished:
        kind = kind_of(model.config)
        content = {"format": FORMAT, "kind": kind, "model": asdict(model.config)}
        if family is not None:
            content["family"] = family
        if isinstance(tokenizer, Subwords):
            content["special_tokens"] = asdict(tokenizer.special)
        write_json(unfinished / "config.json", content)
        leaves = flat(params)
        tensors = {name: lambda leaf=leaf: np.asarray(leaf) for name, leaf in leaves.items()}
        write_tensors(unfinished, tensors, {name: x.nbytes for name, x in leaves.items()})
        if tokenizer is not None:
            tokenizer.save(unfinished / "tokenizer.json")


def checked_params(model, variables) -> dict:
    """The parameters, of this model and as they were trained."""
    if any(is_kernel(x) for x in jax.tree.leaves(variables, is_leaf=is_kernel)):
        raise ValueError("variables hold integers or packed kernels; give the params they are of")
    model.check(variables)
    return variables["params"]


def read_saved(folder: Path, sections: dict, dtype) -> tuple:
    """(config, how to read its parameters, tokenizer) of a folder that `save` wrote."""
    config = parse_kind(sections, folder / "config.json")

    def read(like):
        leaves, tensors = flat(like), stored_tensors(folder)
        for name in sorted(leaves.keys() ^ tensors.keys()):
            what = "is missing" if name in leaves else "has no place in this model"
            raise ValueError(f"{folder}: tensor {name} {what}")
        for name, tensor in tensors.items():
            tensor.check(leaves[name].shape)

        arrays = {
            name: empty(x.shape, DTYPES[x.dtype] if dtype is None else dtype)
            for name, x in tensors.items()
        }

        def leaf(name):
            tensors[name].read_into(arrays[name])
            return name, jax.device_put(arrays.pop(name), leaves[name].sharding)

        return filled(like, dict(in_threads(leaf, leaves, lambda x: leaves[x].size)))

    return config, read, stored_tokenizer(folder, sections)


def stored_tokenizer(folder: Path, sections: dict) -> Tokenizer | Subwords | None:
    """The tokenizer of a folder of ours, None if it has none. sections: of its config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    if "special_tokens" not in sections:
        return Tokenizer.load(path)
    return Subwords.load(path, parse_config(SpecialTokens, sections["special_tokens"], path))


def read_sections(folder: Path) -> dict | None:
    """config.json of a folder in our own format; None if it is of another."""
    path = folder / "config.json"
    sections = read_json(path)
    if "format" not in sections:
        return None
    if sections["format"] != FORMAT:
        raise ValueError(f"{path} has format {sections['format']!r}; this version reads {FORMAT}")
    if "model" not in sections:
        raise ValueError(f"{path} has no section 'model'")
    return sections


def flat_shapes(tree) -> dict:
    """The shapes of a tree's leaves, by their path."""
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def flat(tree, prefix: str = "") -> dict:
    """Leaves by their path, "blocks/attention/query/kernel"."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    found = {}
    for name, branch in tree.items():
        found |= flat(branch, f"{prefix}/{name}" if prefix else name)
    return found


def filled(tree, leaves: dict, prefix: str = ""):
    """The tree with the leaves of those paths in the place of its own: the inverse of `flat`."""
    if not isinstance(tree, dict):
        return leaves[prefix]
    path = f"{prefix}/" if prefix else ""
    return {name: filled(branch, leaves, path + name) for name, branch in tree.items()}
