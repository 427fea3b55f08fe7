"""Reader of models in Hugging Face's format."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.files import read_json
from jaxformer.artifacts.saved import Stored, bound
from jaxformer.artifacts.tensors import DTYPES, Tensor, filled, flat, flat_shapes, stored_tensors
from jaxformer.hub.adapter import read_adapter_beside
from jaxformer.hub.checkpoint_format import CheckpointFormat
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.flax_weights import flax_tensors
from jaxformer.hub.generation import read_generation
from jaxformer.hub.mxfp4 import join_packed
from jaxformer.hub.options import Options
from jaxformer.hub.table import TensorEntry, entries, read_leaves
from jaxformer.hub.tokenizers.files import read_tokenizer
from jaxformer.models.config.transformer import TransformerConfig

_LAYERS = """n_layer n_layers num_hidden_layers num_layers num_decoder_layers encoder_layers
    decoder_layers""".split()
# A larger number of layers would take too long, because `options.pattern` takes quadratic time.
_MOST_LAYERS = 4096
# Sinusoids in bfloat16 differ by up to 0.002 from those in float32.
_ROUNDING = 0.01
# In models with a tied head, tensors with these names may be copies of the embedding table.
_EMBEDDING = re.compile(r"(lm_head|embed_out|vocab_projector|decoder|embed_tokens)\.weight$")


class HuggingFaceCheckpoint(NamedTuple):
    """Content of a folder in Hugging Face's format.

    Attributes:
        stored: The model.
        architecture: The name of the model's class in transformers.
        tensors: The number of tensors of the model.
        updates: The number of linear layers that an adapter in the same folder updates.
    """

    stored: Stored
    architecture: str
    tensors: int
    updates: int


def foreign_folder(folder: Path, dtype: str) -> HuggingFaceCheckpoint:
    """Opens a folder in Hugging Face's format without reading its parameters."""
    options = Options(read_json(folder / "config.json"), folder / "config.json")
    checkpoint_format = find_format(options)
    tensors: dict = flax_tensors(folder, checkpoint_format.model_type) or stored_tensors(folder)
    options.tensors = tensors.keys()
    # A damaged file may contain a huge number of layers. The number is checked before `to_config`,
    # which takes time and memory for each layer.
    for key in _LAYERS:
        if options.whole(key, 0) > min(len(tensors), _MOST_LAYERS):
            most = f"at most {_MOST_LAYERS} and at most the number of tensors ({len(tensors)})"
            raise options.error(key, f"it must be {most}")
    config = checkpoint_format.to_config(options)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    # `to_config` raises an error for any quantization but MXFP4.
    if "quantization_config" in options:
        tensors = join_packed(tensors)
    adapter = read_adapter_beside(folder)
    if tokenizer is not None:
        if tokenizer.base_size > config.vocab_size:
            raise ValueError(
                f"{folder / 'tokenizer.json'} has ids up to {tokenizer.base_size - 1}, but "
                f"vocab_size in config.json is {config.vocab_size}"
            )
        tokenizer = bound(tokenizer, config, folder)

    def read(like: dict) -> dict:
        wanted = entries(checkpoint_format.rows(config), config, flat_shapes(like))
        names = names_in_file(folder, checkpoint_format, wanted, tensors)
        check_constants(checkpoint_format, config, tensors)
        theirs = {x: tensors[name] for x, name in names.items()}
        if adapter is not None:
            theirs = adapter.applied(theirs, wanted, checkpoint_format.base)
        return filled(like, read_leaves(wanted, theirs, flat(like), dtype))

    generation = read_generation(folder, config.vocab_size, checkpoint_format.generation)
    stored_dtype = common_dtype(
        x for name, x in tensors.items() if not checkpoint_format.is_ignored(name)
    )
    stored = Stored(config, read, tokenizer, checkpoint_format.model_type, generation, stored_dtype)
    updates = 0 if adapter is None else len(adapter.factors)
    return HuggingFaceCheckpoint(
        stored, checkpoint_format.class_name(options), len(tensors), updates
    )


def common_dtype(tensors: Iterable[Tensor]) -> str:
    """Returns the tensors' common dtype, or float32 if their dtypes differ."""
    names = {tensor.dtype for tensor in tensors}
    (name,) = names if len(names) == 1 else ("F32",)
    return DTYPES[name] if name in ("BF16", "F16") else "float32"


def find_format(options: Options) -> CheckpointFormat:
    """Returns the family of a config.json; an error lists the supported families."""
    name = options.take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"{options.file}: model_type is {name!r}; it must be one of {supported}")
    return FAMILIES[name]


def names_in_file(
    folder: Path,
    checkpoint_format: CheckpointFormat,
    wanted: list[TensorEntry],
    tensors: dict[str, Tensor],
) -> dict[str, str]:
    """Finds each tensor of the table in the files; returns {name in the table: name in the file}.

    Raises:
        ValueError: A tensor is missing or unknown, or the embeddings are tied and the files
            contain a head that differs from the embeddings.
    """
    names = {checkpoint_format.newer(name): name for name in tensors}
    if checkpoint_format.base and not any(
        name.startswith(checkpoint_format.base) for name in names
    ):
        names = {checkpoint_format.base + new: name for new, name in names.items()} | names
    expected = {entry.theirs for entry in wanted}
    embedding = next(entry.theirs for entry in wanted if entry.ours == ("embedding/tokens",))
    copies = [x for new, x in names.items() if new not in expected and _EMBEDDING.search(x)]
    if copies:
        names = {embedding: copies[0]} | names
    if missing := {name for name in expected if names.get(name) is None}:
        raise ValueError(f"{folder}: {_some(missing)} missing")
    used = {names[name] for name in expected}.union(copies)
    if unused := [
        name for name in tensors if name not in used and not checkpoint_format.is_ignored(name)
    ]:
        raise ValueError(f"{folder}: {_some(unused)} unknown in this model")
    for name in copies:
        if not tensors[name].equals(tensors[names[embedding]]):
            raise ValueError(
                f"{folder}: tensor {name} must equal {names[embedding]}, because the embeddings "
                "are tied in config.json"
            )
    return {name: names[name] for name in expected}


def check_constants(
    checkpoint_format: CheckpointFormat, config: TransformerConfig, tensors: dict[str, Tensor]
) -> None:
    """Raises ValueError if a constant tensor in a file differs from the computed values.

    Some classes of transformers store a constant table, such as sinusoids, in the file.
    transformers uses the stored table, whereas jaxformer computes the table.
    """
    for name, constant in checkpoint_format.constants(config).items():
        stored = next(
            (x for x in (name, name.removeprefix(checkpoint_format.base)) if x in tensors), None
        )
        if stored is None:
            continue
        tensor = tensors[stored]
        tensor.check(constant.shape)
        difference = np.abs(np.float32(tensor.mapped()) - constant.array(constant.shape)).max()
        if not difference <= _ROUNDING:
            raise ValueError(
                f"{tensor.path}: tensor {stored} differs by {difference:.2g} from the values "
                "that its class in transformers computes; only the computed values are supported"
            )
    for name, original in checkpoint_format.copies.items():
        if {name, original} <= tensors.keys() and not tensors[name].equals(tensors[original]):
            raise ValueError(
                f"{tensors[name].path}: tensor {name} must equal {original}, because the class in "
                "transformers ties the two"
            )


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {min(names)}{more}"
