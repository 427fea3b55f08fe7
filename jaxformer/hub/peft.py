"""Writer of LoRA adapters in the format of the PEFT library.

The files are adapter_config.json and adapter_model.safetensors. jaxformer and PEFT define an
adapter in the same way: y = x W + (alpha / r) x A B. PEFT stores A as lora_A.weight [r, inputs] and
B as lora_B.weight [outputs, r].

transformers fuses some linear layers that jaxformer keeps separate. If adapters of rank r update n
of the separate layers, the fused layer gets a single adapter of rank n r. The A of this adapter
contains the n matrices A side by side. Its B is block-diagonal: the blocks are the n matrices B.
"""

from pathlib import Path

import numpy as np

from jaxformer.artifacts.files import new_folder, write_json
from jaxformer.artifacts.run import RunFolder, parse_kind, read_sections
from jaxformer.artifacts.saved import read_lora
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.functional.linear.low_rank import LowRankKernel
from jaxformer.hub.adapter import CONFIG, PREFIX, TENSORS, is_map
from jaxformer.hub.checkpoint_format import CheckpointFormat
from jaxformer.hub.export import counterpart, preferred
from jaxformer.hub.load import adapter_origin, read_adapter
from jaxformer.hub.table import TensorEntry, entries
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree


def export_adapter(out: str | Path, folder: str | Path, *, model_type: str | None = None) -> str:
    """Writes the adapter of a run into a new folder, in the format of PEFT.

    Args:
        out: The folder to create.
        folder: The folder of the run that trained the adapter.
        model_type: See `export`.

    Returns:
        The name of the transformers class that can use the adapter.

    Raises:
        ValueError: The run has no adapter, or transformers has no class for its model.
    """
    from safetensors.numpy import save_file

    run, sections = RunFolder(folder), read_sections(Path(folder)) or {}
    lora, origin = read_lora(sections, run.config), adapter_origin(run.path)
    if lora.lora_rank is None or origin is None:
        raise ValueError(
            f"{folder} has no LoRA adapter; pass the folder of a run trained with --lora-rank"
        )
    model = build(parse_kind(sections, run.config))
    adapter = flat(read_adapter(run, lora, shape_tree(model)))
    families = preferred(model_type, sections.get("model_type"))
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
                    f"the adapter changes {entry.ours[0]}, but PEFT cannot update the router and "
                    "the experts of transformers; export the whole model, or train an adapter for "
                    "other layers (--lora-target-modules)"
                )
            module = entry.theirs.removesuffix(".weight").removeprefix(prefix)
            maps[module] = len(updates)
            for factor, array in zip("AB", _joined(entry, updates), strict=True):
                tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = array
    if "embed_out" in maps:
        raise ValueError(
            "the adapter changes the output head, whose name for gpt_neox differs between versions "
            "of transformers; export the whole model, or train an adapter without the head"
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
        # The weights of GPT-2's Conv1D are [inputs, outputs].
        "fan_in_fan_out": any(is_map(entry) and not entry.is_transposed for entry in wanted),
        "inference_mode": True,
    }
    with new_folder(out) as unfinished:
        write_json(unfinished / CONFIG, content)
        save_file(tensors, unfinished / TENSORS, metadata={"format": "pt"})
    return architecture


def _updates(entry: TensorEntry, adapter: dict) -> dict[int, tuple]:
    """Returns {index in `entry.ours`: (A, B)} for the parameters that the adapter updates."""
    updates = {}
    for place, name in enumerate(entry.ours):
        if isinstance(kernel := adapter.get(name), LowRankKernel):
            factors = (np.asarray(x) for x in (kernel.down, kernel.up))
            updates[place] = tuple(x[entry.place] for x in factors)
    return updates


def _joined(entry: TensorEntry, updates: dict[int, tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Joins all updates of a tensor; returns PEFT's lora_A and lora_B."""
    downs, ups = [], []
    for place, (down, up) in updates.items():
        parts = [np.zeros((len(up), shape[-1]), up.dtype) for shape in entry.shapes]
        parts[place] = up
        ups.append(entry.layout.join(parts, entry.num_groups))
        downs.append(down)
    a, b = np.concatenate(downs, axis=-1).T, np.concatenate(ups, axis=0).T
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def _bare_prefix(checkpoint_format: CheckpointFormat, architecture: str) -> str:
    """Returns the prefix of tensor names that a class of transformers omits, or "".

    A class without an output head, such as LlamaModel, omits the prefix "model.".
    """
    bare = architecture.endswith("Model") and not architecture.endswith(("LMHeadModel", "MTModel"))
    return checkpoint_format.base if bare else ""


def _task(config: TransformerConfig, architecture: str) -> str | None:
    if config.reads_source:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if architecture.endswith(("CausalLM", "LMHeadModel")) else None


def _their_base(path: Path) -> str | None:
    """Returns the path of the base model if it has Hugging Face's format; otherwise None."""
    is_theirs = (path / "config.json").is_file() and read_sections(path) is None
    return str(path) if is_theirs else None
