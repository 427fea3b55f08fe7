"""Writer for a LoRA adapter in the layout of Hugging Face's PEFT library.

The files are adapter_config.json and adapter_model.safetensors. Both libraries add the same update:
y = x W + (alpha / r) x A B. PEFT stores A as lora_A.weight [r, inputs] and B as lora_B.weight
[outputs, r].

One linear map of transformers may be several of ours, fused. Their n updates then become one update
of rank n r: the A are concatenated, and the B form a block matrix.
"""

from pathlib import Path

import numpy as np

from jaxformer.artifacts.files import new_folder, write_json
from jaxformer.artifacts.run import RunFolder, parse_kind, read_sections
from jaxformer.artifacts.saved import lora_of
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.functional.linear.low_rank import LowRankKernel
from jaxformer.hub.adapter import CONFIG, PREFIX, TENSORS, is_map
from jaxformer.hub.export import counterpart, preferred
from jaxformer.hub.family import Family
from jaxformer.hub.load import adapter_origin, read_adapter
from jaxformer.hub.table import TensorEntry, entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree


def export_adapter(out: str | Path, folder: str | Path, *, family: str | None = None) -> str:
    """Writes the adapter of a run into a new folder, for PEFT to add to the run's base model.

    Args:
        out: The folder to create.
        folder: The run.
        family: As in `export`.

    Returns:
        The name of the class in transformers that the adapter is for.

    Raises:
        ValueError: If the run has no adapter, or transformers has no class for its model.
    """
    from safetensors.numpy import save_file

    run, sections = RunFolder(folder), read_sections(Path(folder)) or {}
    lora, origin = lora_of(sections, run.config), adapter_origin(run.path)
    if lora.lora_rank is None or origin is None:
        raise ValueError(f"{folder} has no adapter: it is not a run that trained with --lora-rank")
    model = build(parse_kind(sections, run.config))
    adapter = flat(read_adapter(run, lora, shape_tree(model)))
    families = preferred(family, sections.get("family"))
    matching, config, options = counterpart(model.config, families)
    architecture = options["architectures"][0]
    wanted = entries(matching.rows(config), config, flat_shapes(shape_tree(build(config))))
    prefix = _bare_prefix(matching, architecture)
    tensors, maps = {}, {}
    for entry in wanted:
        if updates := _updates(entry, adapter):
            of_expert = len(entry.place) > 1 or not is_map(entry)
            if of_expert or "feedforward/router" in entry.ours[0]:
                raise ValueError(
                    f"{entry.ours[0]} has an update, but in transformers the router and the "
                    "experts are no linear maps that PEFT can update; export the whole model, or "
                    "train updates of other maps (--lora-maps)"
                )
            module = entry.theirs.removesuffix(".weight").removeprefix(prefix)
            maps[module] = len(updates)
            for factor, array in zip("AB", _joined(entry, updates), strict=True):
                tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = array
    if "embed_out" in maps:
        raise ValueError(
            "the head has an update, but transformers calls a gpt_neox's head by another name in "
            "each of its versions; export the whole model, or train no update of the head"
        )
    fused = {module: number for module, number in maps.items() if number > 1}
    content = {
        "peft_type": "LORA",
        "task_type": _task(config, architecture),
        "base_model_name_or_path": _their_base(origin.path),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "rank_pattern": {module: number * lora.lora_rank for module, number in fused.items()},
        "alpha_pattern": {module: number * lora.lora_alpha for module, number in fused.items()},
        "target_modules": list(maps),
        "lora_dropout": 0.0,
        "bias": "none",
        # GPT-2's Conv1D has weights [inputs, outputs].
        "fan_in_fan_out": any(is_map(entry) and not entry.is_transposed for entry in wanted),
        "inference_mode": True,
    }
    with new_folder(out) as unfinished:
        write_json(unfinished / CONFIG, content)
        save_file(tensors, unfinished / TENSORS, metadata={"format": "pt"})
    return architecture


def _updates(entry: TensorEntry, adapter: dict) -> dict[int, tuple]:
    """Returns (A, B) of this place for each of the entry's leaves that has an update."""
    updates = {}
    for place, name in enumerate(entry.ours):
        if isinstance(kernel := adapter.get(name), LowRankKernel):
            factors = (np.asarray(x) for x in (kernel.down, kernel.up))
            updates[place] = tuple(x[entry.place] for x in factors)
    return updates


def _joined(entry: TensorEntry, updates: dict[int, tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Returns PEFT's (lora_A, lora_B) from our updates of the leaves of one entry."""
    downs, ups = [], []
    for place, (down, up) in updates.items():
        parts = [np.zeros((len(up), shape[-1]), up.dtype) for shape in entry.shapes]
        parts[place] = up
        ups.append(entry.layout.join(parts, entry.num_groups))
        downs.append(down)
    a, b = np.concatenate(downs, axis=-1).T, np.concatenate(ups, axis=0).T
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def _bare_prefix(family: Family, architecture: str) -> str:
    """Returns the prefix that the tensor names of a bare model leave out."""
    bare = architecture.endswith("Model") and not architecture.endswith(("LMHeadModel", "MTModel"))
    return family.base if bare else ""


def _task(config: TransformerConfig, architecture: str) -> str | None:
    if config.reads_source:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if architecture.endswith(("CausalLM", "LMHeadModel")) else None


def _their_base(path: Path) -> str | None:
    """Returns the folder that the run started from, if it has Hugging Face's format."""
    is_theirs = (path / "config.json").is_file() and read_sections(path) is None
    return str(path) if is_theirs else None
