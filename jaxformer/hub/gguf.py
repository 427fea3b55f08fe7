"""Export of a model to a GGUF file for llama.cpp: GPT-2, Llama, Mistral, Qwen 2 and 3.

The `gguf` package writes the file. It maps the tensor names of transformers to those of the format.
"""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from jaxformer.artifacts.files import replacing, require_new
from jaxformer.artifacts.saved import check_layers_of_config, checked_params
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.hub.export import counterpart, of_entry, preferred
from jaxformer.hub.family import canonical
from jaxformer.hub.gguf_vocabulary import Vocabulary, vocabulary, write_vocabulary
from jaxformer.hub.table import TensorEntry, entries
from jaxformer.models.config import RotaryScaling
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {
    "gpt2": "GPT2",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
}

# The kinds of rotary scaling that llama.cpp implements for each architecture. "llama3" scaling has
# a factor per frequency, stored as a tensor that only the architecture LLAMA reads.
SCALINGS = {"LLAMA": ("linear", "llama3"), "QWEN2": ("linear",), "QWEN3": ("linear",), "GPT2": ()}


def export_gguf(
    path: str | Path,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None,
    *,
    dtype: str = "f32",
    family: str | None = None,
) -> None:
    """Writes a GGUF file (see `write_gguf`).

    Args:
        path: The file to create.
        model: The model.
        variables: Its variables.
        tokenizer: Its tokenizer.
        dtype: Type of the matrices in the file, "f32" or "q8_0".
        family: A key of `ARCHITECTURES`. None: the family that the model came from or, if that is
            not a key or has no such model, the first key whose family has.

    Raises:
        ValueError: If llama.cpp has no such model or tokenizer.
    """
    gguf, params = package(), checked_params(model, variables)
    check_layers_of_config(model)
    if family not in (None, *ARCHITECTURES):
        raise ValueError(f"family is {family!r}; in GGUF it must be {', '.join(ARCHITECTURES)}")
    families = preferred(family, model.family, ARCHITECTURES)
    matching, config, _ = counterpart(model.config, families)
    config, architecture = canonical(config), ARCHITECTURES[matching.model_type]
    if tokenizer is None:
        raise ValueError("tokenizer is None; a GGUF file needs one")
    check_supported(config, architecture)
    words = vocabulary(tokenizer, config.vocab_size)
    number = getattr(gguf.MODEL_ARCH, architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    leaves, tensors = flat(params), {}
    for entry in entries(matching.rows(config), config, flat_shapes(params)):
        stem, leaf = entry.theirs.rsplit(".", 1)
        tensor = of_file(entry, leaves, config, architecture == "LLAMA")
        tensors[f"{names.get_name(stem)}.{leaf}"] = tensor
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "llama3":
        head_dim, _, base = _sizes(config)
        plain, scaled = (rotary_frequencies(head_dim, base, x)[0] for x in (None, scaling))
        tensors["rope_freqs.weight"] = np.float32(plain / scaled)
    write_gguf(path, gguf.MODEL_ARCH_NAMES[number], config, words, tensors, dtype)


def of_file(entry: TensorEntry, leaves: dict, config: TransformerConfig, turns: bool) -> np.ndarray:
    """Returns a tensor in the file's layout.

    Matrices are [outputs, inputs]. With `turns`, for Llama, the two features of a rotary pair are
    neighbours.
    """
    tensor = np.asarray(of_entry(entry, leaves), np.float32)
    part = entry.ours[0].split("/")
    if part[-1] == "kernel" and not entry.is_transposed:
        tensor = tensor.T
    if turns and part[-2] in ("query", "key"):
        tensor = neighbours(tensor, _sizes(config)[0])
    return tensor


def check_supported(config: TransformerConfig, architecture: str) -> None:
    """Raises ValueError if an architecture of llama.cpp cannot run the model."""
    required = {"window": None, "rotary_fraction": 1.0, "attention_scale": None}
    if architecture == "GPT2":
        required |= {"activation": "gelu_tanh"}
    if architecture == "QWEN3":
        required |= {"query_key_value_bias": False, "attention_output_bias": False}
    if architecture == "QWEN2" and _sizes(config)[0] * config.num_heads != config.embed_dim:
        raise ValueError(
            f"head_dim is {config.head_dim}; in GGUF head_dim times num_heads must be embed_dim "
            "for a model of llama.cpp's architecture QWEN2"
        )
    for name, only in required.items():
        if getattr(config, name) != only:
            raise ValueError(
                f"{name} is {getattr(config, name)!r}; in GGUF it must be {only!r} for a model of "
                f"llama.cpp's architecture {architecture}"
            )
    scaling, kinds = config.rotary_scaling, SCALINGS[architecture]
    is_known = scaling is None or (isinstance(scaling, RotaryScaling) and scaling.kind in kinds)
    if not is_known:
        raise ValueError(
            f"rotary_scaling is {scaling}; in GGUF its kind must be {' or '.join(kinds)} for a "
            f"model of llama.cpp's architecture {architecture}"
        )


def _sizes(config: TransformerConfig) -> tuple[int, int, float]:
    """Returns head_dim, mlp_dim and rotary_base of a canonical config without patterns."""
    # pyrefly: ignore[bad-return] (a canonical config is resolved)
    return config.head_dim, config.mlp_dim, config.rotary_base


def neighbours(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the rows of each head from the halves layout to neighbouring pairs.

    llama.cpp rotates the queries and keys of a Llama in neighbouring pairs.
    """
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.swapaxes(1, 2).reshape(tensor.shape)


def package() -> ModuleType:
    """Returns the module `gguf`.

    Raises:
        ValueError: If it is not installed. The message says how to install it.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("GGUF files need the package gguf; install jaxformer[gguf]") from None
    return gguf


def write_gguf(
    path: str | Path,
    name: str,
    config: TransformerConfig,
    words: Vocabulary,
    tensors: dict[str, np.ndarray],
    dtype: str,
) -> None:
    """Writes a GGUF file, atomically.

    Args:
        path: The file to create.
        name: llama.cpp's name of the architecture.
        config: The model's config, for the sizes.
        words: The vocabulary.
        tensors: Arrays by their GGUF names.
        dtype: "f32", or "q8_0" for matrices (blocks of 32 integers with one scale).

    Raises:
        ValueError: If `path` exists, or the package `gguf` is not installed.
    """
    gguf, path = package(), require_new(Path(path))
    if path.exists():
        raise ValueError(f"{path} is a folder; name a file")
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, name)
        write_sizes(writer, gguf, config)
        write_vocabulary(writer, gguf, words)
        for name, tensor in tensors.items():
            add(writer, gguf, name, tensor, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def write_sizes(writer: "GGUFWriter", gguf: ModuleType, config: TransformerConfig) -> None:
    """Writes the sizes and constants of the architecture into the header."""
    head_dim, mlp_dim, rotary_base = _sizes(config)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.heads[1])
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rotary_base)
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)


def add(writer: "GGUFWriter", gguf: ModuleType, name: str, tensor: np.ndarray, dtype: str) -> None:
    """Adds a tensor. "q8_0" quantizes a matrix if 32 divides the length of its rows."""
    if dtype == "q8_0" and tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 and "_pos" not in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
