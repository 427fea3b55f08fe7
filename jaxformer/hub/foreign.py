"""Reader of a model in a folder of Hugging Face's format."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.files import read_json
from jaxformer.artifacts.saved import Stored, bound
from jaxformer.artifacts.tensors import DTYPES, Tensor, filled, flat, flat_shapes, stored_tensors
from jaxformer.hub.adapter import read_adapter_beside
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.family import Family
from jaxformer.hub.generation import read_generation
from jaxformer.hub.mxfp4 import join_packed
from jaxformer.hub.options import Options
from jaxformer.hub.table import TensorEntry, entries, read_leaves
from jaxformer.hub.tokenizers.files import read_tokenizer
from jaxformer.models.config.transformer import TransformerConfig

_LAYERS = """n_layer n_layers num_hidden_layers num_layers num_decoder_layers encoder_layers
    decoder_layers""".split()
_MOST_LAYERS = 4096  # finding a pattern among the layers takes quadratic time
_ROUNDING = 0.01  # sinusoids in bfloat16 differ by 0.002 from those in float32
# Names of tensors that may repeat the embedding table, in models whose head is tied to it.
_EMBEDDING = re.compile(r"(lm_head|embed_out|vocab_projector|decoder|embed_tokens)\.weight$")


class Foreign(NamedTuple):
    """Content of a folder in Hugging Face's format.

    Attributes:
        stored: The model.
        architecture: The name of its class in transformers.
        tensors: Number of the model's tensors.
        updates: Number of linear maps that an adapter in the same folder updates.
    """

    stored: Stored
    architecture: str
    tensors: int
    updates: int


def foreign_folder(folder: Path, dtype: str) -> Foreign:
    """Opens a folder in Hugging Face's format without reading its parameters."""
    options = Options(read_json(folder / "config.json"), folder / "config.json")
    family = family_of(options)  # before any tensor file is opened
    tensors = stored_tensors(folder)
    options.tensors = tensors.keys()
    for key in _LAYERS:  # an absurd number of layers must not take memory or time
        if options.whole(key, 0) > min(len(tensors), _MOST_LAYERS):
            raise options.error(key, f"the folder has only {len(tensors)} tensors")
    config = family.to_config(options)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    if "quantization_config" in options:  # the family has read it
        tensors = join_packed(tensors)
    adapter = read_adapter_beside(folder)
    if tokenizer is not None:
        if tokenizer.base_size > config.vocab_size:
            raise ValueError(
                f"{folder / 'tokenizer.json'} has ids up to {tokenizer.base_size - 1}; by "
                f"config.json vocab_size is {config.vocab_size}"
            )
        tokenizer = bound(tokenizer, config, folder)

    def read(like: dict) -> dict:
        wanted = entries(family.rows(config), config, flat_shapes(like))
        names = names_in_file(folder, family, wanted, tensors)
        check_constants(family, config, tensors)
        theirs = {x: tensors[name] for x, name in names.items()}
        if adapter is not None:
            theirs = adapter.applied(theirs, wanted, family.base)
        return filled(like, read_leaves(wanted, theirs, flat(like), dtype))

    generation = read_generation(folder, config.vocab_size, family.generation)
    stored_dtype = common_dtype(x for name, x in tensors.items() if not family.is_ignored(name))
    stored = Stored(config, read, tokenizer, family.model_type, generation, stored_dtype)
    updates = 0 if adapter is None else len(adapter.factors)
    return Foreign(stored, family.class_name(options), len(tensors), updates)


def common_dtype(tensors: Iterable[Tensor]) -> str:
    """Returns a dtype that represents all tensors: their common one, or float32."""
    names = {tensor.dtype for tensor in tensors}
    (name,) = names if len(names) == 1 else ("F32",)
    return DTYPES[name] if name in ("BF16", "F16") else "float32"


def family_of(options: Options) -> Family:
    """Returns the family that config.json names; an error lists the supported families."""
    name = options.take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"{options.file}: model_type is {name!r}; supported: {supported}")
    return FAMILIES[name]


def names_in_file(
    folder: Path, family: Family, wanted: list[TensorEntry], tensors: dict[str, Tensor]
) -> dict[str, str]:
    """Returns the file's name of each tensor in the table.

    Raises:
        ValueError: If a tensor is missing or unknown, or if the embeddings are tied and the file
            has a head that differs from them.
    """
    names = {family.newer(name): name for name in tensors}
    if family.base and not any(name.startswith(family.base) for name in names):
        names = {family.base + new: name for new, name in names.items()} | names
    expected = {entry.theirs for entry in wanted}
    embedding = next(entry.theirs for entry in wanted if entry.ours == ("embedding/tokens",))
    copies = [x for new, x in names.items() if new not in expected and _EMBEDDING.search(x)]
    if copies:
        names = {embedding: copies[0]} | names
    if missing := {name for name in expected if names.get(name) is None}:
        raise ValueError(f"{folder}: {_some(missing)} missing")
    used = {names[name] for name in expected}.union(copies)
    if unused := [name for name in tensors if name not in used and not family.is_ignored(name)]:
        raise ValueError(f"{folder}: {_some(unused)} unknown in this model")
    for name in copies:
        if not tensors[name].equals(tensors[names[embedding]]):
            raise ValueError(
                f"{folder}: tensor {name} differs from {names[embedding]}, to which "
                "config.json ties it"
            )
    return {name: names[name] for name in expected}


def check_constants(family: Family, config: TransformerConfig, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError if a tensor of the file is not what its class would compute.

    transformers computes with the tensor in the file, so a model of ours would differ.
    """
    for name, constant in family.constants(config).items():
        stored = next((x for x in (name, name.removeprefix(family.base)) if x in tensors), None)
        if stored is None:
            continue
        tensor = tensors[stored]
        tensor.check(constant.shape)
        difference = np.abs(np.float32(tensor.mapped()) - constant.array(constant.shape)).max()
        if not difference <= _ROUNDING:
            raise ValueError(
                f"{tensor.path}: tensor {stored} differs by {difference:.2g} from the table that "
                "its class computes; only models with the computed table are supported"
            )
    for name, original in family.copies.items():
        if {name, original} <= tensors.keys() and not tensors[name].equals(tensors[original]):
            raise ValueError(
                f"{tensors[name].path}: tensor {name} differs from {original}, to which its class "
                "ties it"
            )


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {min(names)}{more}"
