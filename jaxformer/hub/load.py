"""From any folder, or a hub id, to a model that runs."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxformer.artifacts.fetch import fetched
from jaxformer.artifacts.load import (
    Checkpoint,
    Stored,
    lora_of,
    newest_params,
    own_folder,
    run_tokenizer,
)
from jaxformer.artifacts.options import Options
from jaxformer.artifacts.origin import Origin, digest_of, read_origin
from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.artifacts.saved import filled, flat, flat_shapes, read_sections
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.table import Entry, entries, read_leaves
from jaxformer.artifacts.tensors import read_json, stored_tensors
from jaxformer.artifacts.tokenizer_files import read_tokenizer
from jaxformer.functional.linear import quantize_all
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.family import Family
from jaxformer.models.build import build
from jaxformer.models.config import Execution
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapter_shapes, merged
from jaxformer.models.placement import parameter_shapes

_LAYERS = """n_layer n_layers num_hidden_layers num_layers num_decoder_layers encoder_layers
    decoder_layers""".split()
_MOST_LAYERS = 4096  # what looks for a pattern among them takes the square of it
# Tensors that hold the table of embeddings once more, where they have no part of their own.
_EMBEDDING = re.compile(r"(lm_head|embed_out|vocab_projector|decoder|embed_tokens)\.weight$")
KERNELS = ("dense", "int8")


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    kernels: str = "dense",
    mesh: Mesh | None = None,
) -> Checkpoint:
    """The model, variables and tokenizer (or None) of a training run, a folder that `save` wrote, a
    folder in Hugging Face's format or, where huggingface_hub is installed, a hub id.

    Of a run: its newest whole checkpoint, a warning if newer ones are damaged; the average, if it
    keeps one of its weights; an adapter added to the weights that it is of. dtype: of the
    parameters and of the activations, "float32" or "bfloat16"; None: float32 parameters, and
    activations as the run's config says. kernels: "int8" quantises every matrix. mesh: the devices
    over which the parameters are spread, each put directly where it lives
    (`jaxformer.models.placement.make_mesh`; compute inside `with jax.set_mesh(mesh)`); None: one.
    Errors: ValueError that names the file and what is wrong in it, before anything large is read.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float32', 'bfloat16' or None")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {KERNELS}")
    folder = fetched(source)
    stored = opened(folder, dtype)
    config = stored.config if dtype is None else replace(stored.config, dtype=dtype)
    model = build(config, execution)
    params = stored.read(parameter_shapes(model, mesh))
    params = params if kernels == "dense" else quantize_all(params)
    return Checkpoint(model, {"params": params}, stored.tokenizer)


def opened(folder: Path, dtype: str | None = None):
    """What a folder of any format holds, `Stored` or `Foreign`; no parameters are read yet. dtype:
    of the parameters; None: float32."""
    return (
        adapted_run(folder, dtype)
        or own_folder(folder, dtype)
        or foreign_folder(folder, dtype or "float32")
    )


def adapted_run(folder: Path, dtype: str | None = None) -> Stored | None:
    """A run that learnt an adapter: its parameters are those of the checkpoint that it began from,
    with the updates added. None for any other folder."""
    sections, run = read_sections(folder), RunFolder(folder)
    lora = lora_of(sections or {}, run.config)
    if lora.lora_rank is None:
        return None
    origin = read_origin(sections, run.config)
    if origin is None:
        raise ValueError(f"{run.config} has no section 'from': what its adapter is of is unknown")

    def read(like):
        params = origin_params(origin, like, run)
        params = merged(params, read_adapter(run, lora, like), lora.scale)
        return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

    return Stored(parse_kind(sections, run.config), read, run_tokenizer(run))


def read_adapter(run: RunFolder, lora: LoraConfig, like) -> dict:
    """The newest adapter of a run; like: the shapes of the parameters that it is of."""
    return newest_params(run, adapter_shapes(like, lora))


def origin_params(origin: Origin, like, run: RunFolder) -> dict:
    """The parameters that a run began from. ValueError if they are no longer what they were."""
    where = f"the weights that {run.path} began from"
    kept = run.base if run.base.is_dir() else origin.path
    if not kept.exists():
        raise ValueError(
            f"{origin.path} is not there, and had {where}; put it back, or write where it is into "
            f"{run.config}"
        )
    params = opened(kept).read(like)
    if digest_of(params) != origin.digest:
        raise ValueError(f"{kept} has changed: its weights are not {where}")
    return params


class Foreign(NamedTuple):
    """What a folder in Hugging Face's format holds; as `Stored`, and what it is there."""

    config: Any
    read: Callable[[Any], dict]
    tokenizer: Subwords | None
    family: str
    architecture: str
    tensors: int


def family_name(source) -> str | None:
    """The family of transformers that a folder is of, or was imported from; None: of none."""
    content = read_json(fetched(source) / "config.json")
    name = content.get("family", content.get("model_type"))
    return name if isinstance(name, str) and name in FAMILIES else None


def foreign_folder(folder: Path, dtype: str) -> Foreign:
    """What a folder in Hugging Face's format holds."""
    options = Options(read_json(folder / "config.json"), folder / "config.json")
    family = family_of(options)  # before any tensor is looked at
    tensors = stored_tensors(folder)
    options.tensors = tensors.keys()
    for key in _LAYERS:  # nothing is made of so many that they cannot be there
        if options.whole(key, 0) > min(len(tensors), _MOST_LAYERS):
            raise options.error(key, f"there are {len(tensors)} tensors in all")
    config, tokenizer = family.to_config(options), read_tokenizer(folder)
    if tokenizer is not None and tokenizer.own_size > config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has ids up to {tokenizer.own_size - 1}; by config.json "
            f"vocab_size is {config.vocab_size}"
        )

    def read(like):
        return read_parameters(folder, tensors, family, config.resolved, like, dtype)

    about = (family.model_type, family.class_name(options), len(tensors))
    return Foreign(config, read, tokenizer, *about)


def family_of(options: Options) -> Family:
    """The family that config.json names; ValueError with those that there are."""
    name = options.take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"{options.file}: model_type is {name!r}; supported: {supported}")
    return FAMILIES[name]


def read_parameters(folder: Path, tensors: dict, family: Family, config, like, dtype: str) -> dict:
    """The parameters: tensors are mapped one by one, each into its place in one of ours."""
    wanted = entries(family.rows(config), config, flat_shapes(like))
    names = found_names(folder, family, wanted, tensors)
    found = read_leaves(wanted, {x: tensors[name] for x, name in names.items()}, flat(like), dtype)
    return filled(like, found)


def found_names(folder: Path, family: Family, wanted: list[Entry], tensors) -> dict:
    """{name in the table: name in the file}; ValueError for what is missing or not asked for, and
    for a head of its own beside tied embeddings."""
    names = {family.newer(name): name for name in tensors}
    if family.base and not any(name.startswith(family.base) for name in names):
        names = {family.base + new: name for new, name in names.items()} | names
    expected = {entry.theirs for entry in wanted}
    embedding = next(entry.theirs for entry in wanted if entry.ours == ("embedding/tokens",))
    copies = [x for new, x in names.items() if new not in expected and _EMBEDDING.search(x)]
    names = dict.fromkeys([embedding], next(iter(copies), None)) | names
    missing = {name for name in expected if names.get(name) is None}
    if missing:
        raise ValueError(f"{folder}: {_some(missing)} missing")
    used = {names[name] for name in expected}
    used.update(copies)
    unused = [name for name in tensors if name not in used and not family.is_ignored(name)]
    if unused:
        raise ValueError(f"{folder}: {_some(unused)} without place in this model")
    for name in copies:
        if not tensors[name].equals(tensors[names[embedding]]):
            raise ValueError(
                f"{folder}: tensor {name} differs from {names[embedding]}, as which "
                "config.json has it"
            )
    return {name: names[name] for name in expected}


def _some(names) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {min(names)}{more}"
