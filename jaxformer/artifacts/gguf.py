"""The GGUF file format of llama.cpp, by its own package."""

import json
import os
from pathlib import Path

import numpy as np

from jaxformer.artifacts.tensors import require_new
from jaxformer.artifacts.tokenizer import Tokenizer


def package():
    """The module gguf; ValueError, and how to install it, if it is not there."""
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf; install jaxformer[gguf]") from None
    return gguf


def write_gguf(path, name: str, config, tokenizer: Tokenizer, tensors: dict, dtype: str) -> None:
    """Write a file of an architecture of that name: sizes, vocabulary and tensors, {name: array}.

    dtype: "f32", or "q8_0" for matrices (blocks of 32 integers with a scale). The file is there
    whole or not at all; ValueError if there is something already.
    """
    gguf, path = package(), require_new(Path(path))
    if path.exists():
        raise ValueError(f"{path} is a folder; name a file")
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    writer = gguf.GGUFWriter(unfinished, name)
    try:
        write_sizes(writer, config)
        write_vocabulary(writer, gguf, tokenizer, config.vocab_size)
        for name, tensor in tensors.items():
            add(writer, gguf, name, tensor, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


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


def add(writer, gguf, name: str, tensor, dtype: str):
    """A tensor, its matrices quantised if asked and their rows allow it."""
    if dtype == "q8_0" and tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 and "_pos" not in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
