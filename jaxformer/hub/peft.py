"""An adapter in the layout of Hugging Face's PEFT library: adapter_config.json and
adapter_model.safetensors.

Theirs is the same update of the same product, y = x W + (alpha / r) x A B, with A as lora_A.weight
[r, inputs] and B as lora_B.weight [outputs, r]. Where one map of theirs is several of ours, side by
side, the updates of those make one of as many times the rank: A side by side, B block by block.
"""

from pathlib import Path

import numpy as np

from jaxformer.artifacts.load import lora_of
from jaxformer.artifacts.origin import read_origin
from jaxformer.artifacts.run import RunFolder, parse_kind
from jaxformer.artifacts.saved import flat, flat_shapes, read_sections
from jaxformer.artifacts.table import Entry, entries
from jaxformer.artifacts.tensors import new_folder, write_json
from jaxformer.hub.export import counterpart
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.load import family_name, read_adapter
from jaxformer.models.build import build, shape_tree
from jaxformer.models.config.encoder_decoder import ReadsSource

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_adapter(out, folder, *, family: str | None = None) -> str:
    """Write the adapter of a run into a new folder, which PEFT puts on the model that the run began
    from. Returns the name of the class of theirs that it is for.

    family: as of `export`. ValueError if the run has no adapter, or its model no class of theirs.
    """
    run, sections = RunFolder(folder), read_sections(Path(folder))
    lora = lora_of(sections or {}, run.config)
    if lora.lora_rank is None:
        raise ValueError(f"{folder} has no adapter: it is no run with a --lora-rank")
    model = build(parse_kind(sections, run.config))
    adapter = flat(read_adapter(run, lora, shape_tree(model)))
    name = family or family_name(folder)
    families = FAMILIES.values() if name is None else [FAMILIES[name]]
    family, config, options = counterpart(model.config, families)
    architecture = options["architectures"][0]
    wanted = entries(family.rows(config), config, flat_shapes(shape_tree(build(config))))
    prefix = _bare_prefix(family, architecture)
    tensors, maps = {}, {}
    for entry in wanted:
        if updates := _updates(entry, adapter):
            module = entry.theirs.removesuffix(".weight").removeprefix(prefix)
            maps[module] = len(updates)
            a, b = _joined(entry, updates)
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
    if "embed_out" in maps:
        raise ValueError(
            "the head has an update, but transformers calls a gpt_neox's head by another name in "
            "each of its versions; export the whole model, or learn no update of the head"
        )
    several = {module: number for module, number in maps.items() if number > 1}
    content = {
        "peft_type": "LORA",
        "task_type": _task(config, architecture),
        "base_model_name_or_path": _their_base(sections, run),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "rank_pattern": {module: number * lora.lora_rank for module, number in several.items()},
        "alpha_pattern": {module: number * lora.lora_alpha for module, number in several.items()},
        "target_modules": list(maps),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(_is_as_ours(entry) for entry in wanted),
        "inference_mode": True,
    }
    _write(out, content, tensors)
    return architecture


def _write(out, content: dict, tensors: dict) -> None:
    from safetensors.numpy import save_file

    with new_folder(out) as unfinished:
        write_json(unfinished / CONFIG, content)
        save_file(tensors, unfinished / TENSORS, metadata={"format": "pt"})


def _updates(entry: Entry, adapter: dict) -> dict[int, tuple]:
    """(A, B) of this layer for each map of ours that has an update, by its place in the entry."""
    found = {}
    for place, name in enumerate(entry.ours):
        path = name.removesuffix("/kernel")
        if name.endswith("/kernel") and f"{path}/lora_a" in adapter:
            both = (np.asarray(adapter[f"{path}/{x}"]) for x in ("lora_a", "lora_b"))
            found[place] = tuple(x if entry.layer is None else x[entry.layer] for x in both)
    return found


def _joined(entry: Entry, updates: dict[int, tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Their (lora_A, lora_B), of our updates of the maps that they have as one."""
    downs, ups = [], []
    for place, (down, up) in updates.items():
        parts = [np.zeros((len(up), shape[-1]), up.dtype) for shape in entry.shapes]
        parts[place] = up
        ups.append(entry.layout.join(parts, entry.num_heads))
        downs.append(down)
    a, b = np.concatenate(downs, axis=-1).T, np.concatenate(ups, axis=0).T
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def _is_as_ours(entry: Entry) -> bool:
    """Whether theirs is GPT-2's Conv1D, with weights [inputs, outputs]."""
    return entry.ours[0].endswith("/kernel") and not entry.layout.is_transposed


def _bare_prefix(family, architecture: str) -> str:
    """What the names of a bare model, without a head, leave out of the table's."""
    bare = architecture.endswith("Model") and not architecture.endswith(("LMHeadModel", "MTModel"))
    return family.base if bare else ""


def _task(config, architecture: str) -> str | None:
    if isinstance(config, ReadsSource):
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if architecture.endswith(("CausalLM", "LMHeadModel")) else None


def _their_base(sections: dict, run: RunFolder) -> str | None:
    """The folder that the run began from, if it is in their format."""
    path = read_origin(sections, run.config).path
    is_theirs = (path / "config.json").is_file() and read_sections(path) is None
    return str(path) if is_theirs else None
