"""Loading of a model from a folder in any supported format, or from a hub id."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from jaxformer.artifacts.run import Origin, RunFolder, read_origin, read_sections
from jaxformer.artifacts.saved import Checkpoint, Stored, newest_params, own_folder, read_lora
from jaxformer.artifacts.tensors import compute_digest
from jaxformer.artifacts.values import Named, from_json
from jaxformer.functional.linear.affine import quantize_all
from jaxformer.hub.adapter import CONFIG as ADAPTER
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.flax_weights import WEIGHTS_INDEX
from jaxformer.hub.huggingface import foreign_folder
from jaxformer.models.builders.check_own import check_functions
from jaxformer.models.config import Execution
from jaxformer.models.config.check import shown
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.kinds import build
from jaxformer.models.lora import adapter_shapes, merged
from jaxformer.models.sharding.parameters import parameter_shapes
from jaxformer.optional import import_optional

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = """config.json generation_config.json model*.safetensors model.safetensors.index.json
    adapter_config.json adapter_model.safetensors""".split()
_TOKENIZERS = """tokenizer*.json vocab.* merges.txt *.model *.spm special_tokens_map.json
    added_tokens.json chat_template.jinja additional_chat_templates/*.jinja""".split()
_FLAX = ["flax_model*.msgpack", WEIGHTS_INDEX]
# The base model of an adapter can itself be an adapter of another base model. At most this many
# base models are loaded.
_MOST_BASES = 16
KERNELS = ("dense", "int8")


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    kernels: str = "dense",
    mesh: Mesh | None = None,
    layers: Iterable[Named] = (),
    trust_code: bool = False,
) -> Checkpoint:
    """Loads a model, its variables and its tokenizer.

    If `source` is a training run, its newest undamaged checkpoint is loaded; damaged newer
    checkpoints cause a warning. If the run maintains an average of its weights, the average is
    loaded. A LoRA adapter is added to its base weights. Invalid arguments and settings raise an
    error before large files are read.

    Args:
        source: A training run, a folder that `save` wrote, a folder in Hugging Face's format or, if
            huggingface_hub is installed, a hub id.
        dtype: dtype of the parameters and activations, "float32" or "bfloat16". By default,
            parameters are float32, and activations have the dtype of the config.
        execution: The execution options, such as the attention implementation.
        kernels: "dense" loads the matrices as floats. "int8" quantizes every matrix.
        mesh: The devices over which the parameters are sharded, from
            `jaxformer.models.sharding.parameters.make_mesh`. Each shard is loaded directly onto its
            device. Run the model inside `with jax.set_mesh(mesh)`. Defaults to a single device.
        layers: Your own classes and functions that the folder refers to: sub-layers, masks and
            activations.
        trust_code: Whether to import the user-defined classes and functions that `layers` does not
            contain, from the current directory or the Python path. Importing a module runs its
            code, so set this only for a folder that you trust. By default, `load` imports nothing
            by name, so a folder cannot run code.

    Returns:
        The model, its variables, and its tokenizer or None.

    Raises:
        ValueError: The folder cannot be loaded. The message gives the file and the fault.
    """
    layers = tuple(layers)
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float32', 'bfloat16' or None")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {KERNELS}")
    folder = fetched(source)
    stored = opened(folder, dtype)
    config = stored.config if dtype is None else replace(stored.config, dtype=dtype)
    own = {
        name: from_json(value, layers, f"{folder}/config.json: {name}", trust_code=trust_code)
        for name, value in stored.own.items()
    }
    functions = {name: x for name, x in own.items() if "function" in stored.own[name]}
    check_functions(functions, config)
    model = build(
        config,
        execution,
        **own,
        model_type=stored.model_type,
        generation=stored.generation,
        checkpoint_dtype=dtype or stored.checkpoint_dtype,
    )
    params = stored.read(parameter_shapes(model, mesh))
    params = params if kernels == "dense" else quantize_all(params)
    return Checkpoint(model, {"params": params}, stored.tokenizer)


def fetched(source: str | Path) -> Path:
    """Returns the local folder of `source`, after downloading a hub id that is not in the cache.

    Args:
        source: A folder, or a hub id (OWNER/NAME).

    Raises:
        ValueError: `source` is neither a folder nor a hub id, or the download fails.
    """
    if Path(source).is_dir():
        return Path(source)
    if not _ID.fullmatch(str(source)) or Path(source).exists():
        raise ValueError(f"{source} does not exist; name a folder or a hub id (OWNER/NAME)")
    import_optional("huggingface_hub", f"download {source}, which is not a local folder", "hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def download(*patterns: str) -> Path:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))

    try:
        folder = download(*_FILES, *_TOKENIZERS)
        # Flax weights are needed only if the hub has no PyTorch weights of the model.
        if not any(folder.glob("model*.safetensors")):
            folder = download(*_FILES, *_TOKENIZERS, *_FLAX)
        return folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ValueError(
            f"{source} is not a local folder, and downloading it as a hub id failed: {reason}"
        ) from None


def opened(folder: Path, dtype: str | None = None) -> Stored:
    """Opens a folder in any supported format without reading its parameters.

    For a run that trained an adapter, the parameters are the base weights plus the updates.

    Args:
        folder: The folder.
        dtype: dtype of the parameters. Defaults to float32.

    Raises:
        ValueError: The folder does not contain a supported model. Or the folder contains a run that
            trained an adapter, and the adapter's base model is unknown or is this run.
    """
    config, adapter = folder / "config.json", folder / ADAPTER
    if adapter.is_file() and not config.is_file():
        raise ValueError(
            f"{folder} contains a PEFT adapter without its model; copy the adapter's files into "
            "the folder of the model"
        )
    sections = read_sections(folder)
    if sections is None:
        return foreign_folder(folder, dtype or "float32").stored
    if adapter.is_file():
        raise ValueError(
            f"{adapter} is an adapter for a model in Hugging Face's format, but this folder has "
            "jaxformer's format; move the adapter into the folder of its model"
        )
    if (model_type := sections.get("model_type")) not in (None, *FAMILIES):
        names = ", ".join(FAMILIES)
        raise ValueError(f"{config}: model_type is {shown(model_type)}; it must be one of {names}")
    if (origin := adapter_origin(folder)) is None:
        return own_folder(folder, sections, dtype)
    check_acyclic(folder)
    run, lora = RunFolder(folder), read_lora(sections, config)

    def read(like: dict) -> dict:
        return merged(origin_params(origin, like, run), read_adapter(run, lora, like))

    return own_folder(folder, sections, dtype, read)


def adapter_origin(folder: Path) -> Origin | None:
    """Returns the base model of a run that trained an adapter; None for any other folder."""
    sections, where = read_sections(folder) or {}, folder / "config.json"
    if read_lora(sections, where).lora_rank is None:
        return None
    origin = read_origin(sections, where)
    if origin is None:
        raise ValueError(
            f"{where} has no section 'init_from', which must contain the base model of the adapter"
        )
    return origin


def check_acyclic(folder: Path) -> None:
    """Raises ValueError if a run is its own base, directly or through other runs."""
    chain, run = [folder.resolve()], folder
    while (run / "config.json").is_file() and (origin := adapter_origin(run)) is not None:
        base = base_folder(RunFolder(run), origin)
        if base.resolve() in chain:
            raise ValueError(
                f"{run / 'config.json'}: init_from is {origin.path}, which is an adapter of this "
                "run itself; set init_from to the folder of the base model"
            )
        chain.append(base.resolve())
        run = base
        if len(chain) > _MOST_BASES:
            raise ValueError(
                f"{folder} is an adapter of an adapter, and so on: it has more than "
                f"{_MOST_BASES} bases; at most {_MOST_BASES} are loaded"
            )


def base_folder(run: RunFolder, origin: Origin) -> Path:
    """Returns the copy of the base model in the run's folder, or the original if no copy exists."""
    return run.base if run.base.is_dir() else origin.path


def read_adapter(run: RunFolder, lora: LoraConfig, like: dict) -> dict:
    """Reads the newest adapter of a run.

    Args:
        run: The run's folder.
        lora: The settings of the adapter.
        like: The shapes and shardings of the base model's parameters.
    """
    return newest_params(run, adapter_shapes(like, lora))


def origin_params(origin: Origin, like: dict, run: RunFolder) -> dict:
    """Reads the parameters from which a run started.

    Raises:
        ValueError: The folder that contained the parameters is missing, or the parameters have
            changed since the run started.
    """
    weights, base = f"the weights that {run.path} started from", base_folder(run, origin)
    if not base.exists():
        raise ValueError(
            f"{origin.path} does not exist, but contained {weights}; restore the folder, or write "
            f"its new path into {run.config}"
        )
    params = opened(base).read(like)
    if compute_digest(params) != origin.digest:
        raise ValueError(f"{base} has changed: its weights differ from {weights}")
    return params
