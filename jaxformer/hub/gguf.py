"""From a model to a GGUF file, which llama.cpp opens: GPT-2, Llama, Mistral, Qwen 2 and 3.

The names of the tensors are those of transformers, mapped by the format's own package.
"""

import numpy as np

from jaxformer.artifacts.gguf import package, write_gguf
from jaxformer.artifacts.saved import checked_params, flat
from jaxformer.artifacts.table import Entry, entries
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.hub.export import counterpart, of_entry
from jaxformer.hub.families import FAMILIES

ARCHITECTURES = {
    "gpt2": "GPT2",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
}


def export_gguf(path, model, variables, tokenizer, *, dtype: str = "f32", family=None) -> None:
    """Write the file: see `write_gguf`. ValueError if llama.cpp has no such model or tokenizer."""
    gguf, params = package(), checked_params(model, variables)
    families = [FAMILIES[x] for x in ([family] if family in ARCHITECTURES else ARCHITECTURES)]
    family, config, _ = counterpart(model.config, families)
    refuse(config, tokenizer)
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[family.model_type])
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    leaves, tensors = flat(params), {}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    for entry in entries(family.rows(config), config, shapes):
        stem, leaf = entry.theirs.rsplit(".", 1)
        turns = architecture == gguf.MODEL_ARCH.LLAMA
        tensors[f"{names.get_name(stem)}.{leaf}"] = of_file(entry, leaves, config, turns)
    if config.rotary_scaling is not None:
        how = (config.head_dim, config.rotary_base)
        plain, scaled = (rotary_frequencies(*how, x)[0] for x in (None, config.rotary_scaling))
        tensors["rope_freqs.weight"] = np.float32(plain / scaled)
    write_gguf(path, gguf.MODEL_ARCH_NAMES[architecture], config, tokenizer, tensors, dtype)


def of_file(entry: Entry, leaves: dict, config, turns: bool):
    """The tensor as the file has it: matrices are [outputs, inputs], and of a Llama (`turns`) the
    features that turn together are neighbours."""
    tensor = np.float32(of_entry(entry, leaves))
    part = entry.ours[0].split("/")
    if part[-1] == "kernel" and not entry.is_transposed:
        tensor = tensor.T
    if turns and part[-2] in ("query", "key"):
        tensor = neighbours(tensor, config.head_dim)
    return tensor


def refuse(config, tokenizer):
    """ValueError for what llama.cpp's architectures of these names have not."""
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer is {type(tokenizer).__name__}; GGUF takes byte-level BPE")
    if tokenizer is None:
        raise ValueError("tokenizer is None; a GGUF file holds one")
    if config.window is not None:
        raise ValueError(f"window is {config.window}; in GGUF it must be None")
    plain = {"rotary_fraction": 1.0, "attention_scale": None}
    plain |= {"activation": "gelu_tanh"} if config.norm == "layer" else {}
    for name, only in plain.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name} is {getattr(config, name)!r}; in GGUF it must be {only!r}")
    if "Digits" in tokenizer.to_json():
        raise ValueError("tokenizer splits digits; in GGUF it must divide text as GPT-2's does")
    scaling = config.rotary_scaling
    if isinstance(scaling, tuple) or (scaling is not None and scaling.kind == "yarn"):
        raise ValueError(f"rotary_scaling is {scaling}; in GGUF it must be linear or llama3")


def neighbours(tensor, head_dim: int):
    """Rows of a head reordered, from the halves layout to pairs of neighbours, as llama.cpp turns
    queries and keys of a Llama."""
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)
