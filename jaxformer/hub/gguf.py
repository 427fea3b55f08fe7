"""From a model to a GGUF file, which llama.cpp opens: GPT-2, Llama, Mistral, Qwen 2 and 3.

The names of the tensors are those of transformers, mapped by the format's own package.
"""

from pathlib import Path

import numpy as np

from jaxformer.artifacts.saved import checked_params, flat
from jaxformer.artifacts.table import entries
from jaxformer.artifacts.tensors import require_new
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
    """Write the file. dtype: "f32", or "q8_0" for matrices (blocks of 32 integers with a scale).

    ValueError if llama.cpp has no such model or tokenizer, or if the path holds something.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf; install jaxformer[gguf]") from None
    path = require_new(Path(path))
    params = checked_params(model, variables)
    families = [FAMILIES[x] for x in ([family] if family in ARCHITECTURES else ARCHITECTURES)]
    family, config, _ = counterpart(model.config, families)
    refuse(config, tokenizer)
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[family.model_type])
    unfinished = path.with_name(f"{path.name}.unfinished")
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        write_sizes(writer, config)
        write_vocabulary(writer, gguf, tokenizer, config.vocab_size)
        names = gguf.get_tensor_name_map(architecture, config.num_layers)
        leaves = flat(params)
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        for entry in entries(family.rows(config), config, shapes):
            tensor = np.float32(of_entry(entry, leaves))
            if family.model_type == "gpt2" and not entry.is_transposed and tensor.ndim == 2:
                tensor = tensor.T if "embedding" not in entry.ours[0] else tensor
            if architecture == gguf.MODEL_ARCH.LLAMA and entry.ours[0].split("/")[-2] in _TURNED:
                tensor = neighbours(tensor, config.head_dim)
            stem, leaf = entry.theirs.rsplit(".", 1)
            add(writer, gguf, f"{names.get_name(stem)}.{leaf}", tensor, dtype)
        if config.rotary_scaling is not None:
            plain, _ = rotary_frequencies(config.head_dim, config.rotary_base)
            scaled, _ = rotary_frequencies(
                config.head_dim, config.rotary_base, config.rotary_scaling
            )
            writer.add_tensor("rope_freqs.weight", np.float32(plain / scaled))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


_TURNED = ("query", "key")


def refuse(config, tokenizer):
    """ValueError for what llama.cpp's architectures of these names have not."""
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer is {type(tokenizer).__name__}; GGUF takes byte-level BPE")
    if tokenizer is None:
        raise ValueError("tokenizer is None; a GGUF file holds one")
    if config.window is not None:
        raise ValueError(f"window is {config.window}; in GGUF it must be None")
    scaling = config.rotary_scaling
    if isinstance(scaling, tuple) or (scaling is not None and scaling.kind == "yarn"):
        raise ValueError(f"rotary_scaling is {scaling}; in GGUF it must be linear or llama3")


def write_sizes(writer, config):
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rotary_base)


def write_vocabulary(writer, gguf, tokenizer: Tokenizer, vocab_size: int):
    """Tokens in their byte alphabet, and the merges."""
    import json

    parts = json.loads(tokenizer.to_json())
    vocabulary = {token: word for word, token in parts["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in parts["added_tokens"]}
    words = [special.get(n, vocabulary.get(n, f"<unused{n}>")) for n in range(vocab_size)]
    kinds = gguf.TokenType
    types = [
        kinds.CONTROL if n in special else kinds.NORMAL if n in vocabulary else kinds.UNUSED
        for n in range(vocab_size)
    ]
    merges = [x if isinstance(x, str) else " ".join(x) for x in parts["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(True)


def neighbours(tensor, head_dim: int):
    """Rows of a head reordered, from the halves layout to pairs of neighbours, as llama.cpp turns
    queries and keys of a Llama."""
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


def add(writer, gguf, name: str, tensor, dtype: str):
    """A tensor, its matrices quantised if asked and their rows allow it."""
    if dtype == "q8_0" and tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 and "_pos" not in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
