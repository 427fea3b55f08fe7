"""Loading of a model from a folder of any format, or from a hub id."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from jaxformer.artifacts.run import Origin, RunFolder, read_origin, read_sections
from jaxformer.artifacts.saved import Checkpoint, Stored, lora_of, newest_params, own_folder
from jaxformer.artifacts.tensors import digest_of
from jaxformer.artifacts.values import from_json
from jaxformer.functional.linear.affine import quantize_all
from jaxformer.hub.adapter import CONFIG as ADAPTER
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.foreign import foreign_folder
from jaxformer.models.config import Execution
from jaxformer.models.config.check import shown
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.kinds import build
from jaxformer.models.lora import adapter_shapes, merged
from jaxformer.models.mesh import parameter_shapes

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = """config.json generation_config.json model*.safetensors model.safetensors.index.json
    adapter_config.json adapter_model.safetensors""".split()
_TOKENIZERS = """tokenizer*.json vocab.* merges.txt *.model *.spm special_tokens_map.json
    added_tokens.json chat_template.jinja additional_chat_templates/*.jinja""".split()
_MOST_BASES = 16  # runs in a chain in which each run is an adapter of the next one
KERNELS = ("dense", "int8")


def load(
    source: str | Path,
    *,
    dtype: str | None = None,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    kernels: str = "dense",
    mesh: Mesh | None = None,
    layers: Iterable[type] = (),
) -> Checkpoint:
    """Loads a model, its variables and its tokenizer.

    The parameters of a run are those of its newest undamaged checkpoint, with a warning if newer
    checkpoints are damaged. If the run maintains an average of its weights, the average is loaded.
    A LoRA adapter is added to its base weights. Errors are raised before anything large is read.

    Args:
        source: A training run, a folder that `save` wrote, a folder in Hugging Face's format or, if
            huggingface_hub is installed, a hub id.
        dtype: dtype of the parameters and activations, "float32" or "bfloat16". None: float32
            parameters, and activations as in the config.
        execution: How the model runs.
        kernels: "int8" quantizes every matrix.
        mesh: The devices over which the parameters are sharded, each parameter directly onto its
            devices (`jaxformer.models.mesh.make_mesh`; compute inside
            `with jax.set_mesh(mesh)`). None: one device.
        layers: Your own classes of sub-layers, for a folder that names them. A folder never says
            where a class is, so that loading runs no code of its choice.

    Returns:
        The model, its variables, and its tokenizer or None.

    Raises:
        ValueError: If the folder cannot be loaded. The message names the file and the fault.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float32', 'bfloat16' or None")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {KERNELS}")
    folder = fetched(source)
    stored = opened(folder, dtype)
    config = stored.config if dtype is None else replace(stored.config, dtype=dtype)
    model = build(
        config,
        execution,
        family=stored.family,
        generation=stored.generation,
        checkpoint_dtype=dtype or stored.checkpoint_dtype,
    )
    if stored.layers is not None:
        own = from_json(stored.layers, layers, f"{folder}/config.json: layers")
        model = model.clone(layers=own)
    params = stored.read(parameter_shapes(model, mesh))
    params = params if kernels == "dense" else quantize_all(params)
    return Checkpoint(model, {"params": params}, stored.tokenizer)


def fetched(source: str | Path) -> Path:
    """Returns the local folder of `source`; downloads a hub id unless it is in the hub's cache.

    Args:
        source: A folder, or a hub id (OWNER/NAME).

    Raises:
        ValueError: If `source` is neither, or the download fails.
    """
    if Path(source).is_dir():
        return Path(source)
    if not _ID.fullmatch(str(source)) or Path(source).exists():
        raise ValueError(f"{source} is no folder (and no hub id, OWNER/NAME)")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(
            f"{source} is no folder; to download it as a hub id, install jaxformer[hub]"
        ) from None
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*_FILES, *_TOKENIZERS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ValueError(
            f"{source} is no folder here, and as a hub id it cannot be downloaded: {reason}"
        ) from None


def opened(folder: Path, dtype: str | None = None) -> Stored:
    """Opens a folder of any format without reading its parameters.

    The parameters of a run that trained an adapter are those of its base plus the updates.

    Args:
        folder: The folder.
        dtype: dtype of the parameters; None: float32.

    Raises:
        ValueError: If it holds no model, or one that is not implemented, or a run that trained an
            adapter of an unknown base, or of itself.
    """
    config, adapter = folder / "config.json", folder / ADAPTER
    if adapter.is_file() and not config.is_file():
        raise ValueError(
            f"{folder} holds an adapter of PEFT without its model; copy the adapter's files into "
            "the folder of the model"
        )
    sections = read_sections(folder)
    if sections is None:
        return foreign_folder(folder, dtype or "float32").stored
    if adapter.is_file():
        raise ValueError(
            f"{adapter} is beside a model in this project's own format, for which PEFT "
            "has no adapters; move it into the folder of the model that it is for"
        )
    if (family := sections.get("family")) not in (None, *FAMILIES):
        names = ", ".join(FAMILIES)
        raise ValueError(f"{config}: family is {shown(family)}; it must be one of {names}")
    if (origin := adapter_origin(folder)) is None:
        return own_folder(folder, sections, dtype)
    check_acyclic(folder)
    run, lora = RunFolder(folder), lora_of(sections, config)

    def read(like: dict) -> dict:
        return merged(origin_params(origin, like, run), read_adapter(run, lora, like))

    return own_folder(folder, sections, dtype, read)


def adapter_origin(folder: Path) -> Origin | None:
    """Returns the base of a run that trained an adapter; None for any other folder."""
    sections, where = read_sections(folder) or {}, folder / "config.json"
    if lora_of(sections, where).lora_rank is None:
        return None
    origin = read_origin(sections, where)
    if origin is None:
        raise ValueError(f"{where} has no section 'from', which names the base of the adapter")
    return origin


def check_acyclic(folder: Path) -> None:
    """Raises ValueError if a run is its own base, directly or through other runs."""
    chain, run = [folder.resolve()], folder
    while (run / "config.json").is_file() and (origin := adapter_origin(run)) is not None:
        base = base_folder(RunFolder(run), origin)
        if base.resolve() in chain:
            raise ValueError(
                f"{run / 'config.json'}: from is {origin.path}, but that is an adapter of this run "
                "itself; write the path of the weights that the run began from"
            )
        chain.append(base.resolve())
        run = base
        if len(chain) > _MOST_BASES:
            raise ValueError(f"{folder} is an adapter of more than {_MOST_BASES} runs in a chain")


def base_folder(run: RunFolder, origin: Origin) -> Path:
    """Returns the folder of a run's base: the copy inside the run, otherwise the named folder."""
    return run.base if run.base.is_dir() else origin.path


def read_adapter(run: RunFolder, lora: LoraConfig, like: dict) -> dict:
    """Reads the newest adapter of a run; `like` has the shapes of the base's parameters."""
    return newest_params(run, adapter_shapes(like, lora))


def origin_params(origin: Origin, like: dict, run: RunFolder) -> dict:
    """Reads the parameters that a run started from; raises ValueError if they have changed."""
    weights, base = f"the weights that {run.path} began from", base_folder(run, origin)
    if not base.exists():
        raise ValueError(
            f"{origin.path} does not exist, and had {weights}; put it back, or write where it is "
            f"into {run.config}"
        )
    params = opened(base).read(like)
    if digest_of(params) != origin.digest:
        raise ValueError(f"{base} has changed: its weights are not {weights}")
    return params
