"""Export of a model to a GGUF file for llama.cpp: GPT-2, Llama, Mistral, Qwen 2 and 3, Gemma 3.

The `gguf` package writes the file and converts the tensor names of transformers to those of GGUF.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxformer.artifacts.files import replacing, require_new
from jaxformer.artifacts.saved import check_of_config, checked_params
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.hub.checkpoint_format import canonical
from jaxformer.hub.export import counterpart, preferred
from jaxformer.hub.gguf_gemma import gemma_header
from jaxformer.hub.gguf_vocabulary import vocabulary
from jaxformer.hub.table import TensorEntry, entries
from jaxformer.models.config import RotaryScaling
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.optional import import_optional

ARCHITECTURES = {
    "gpt2": "GPT2",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma3_text": "GEMMA3",
}

# The types of rotary scaling that llama.cpp implements for each architecture. "llama3" scaling
# needs a tensor of factors per frequency, which only the architecture LLAMA reads.
SCALINGS = {"LLAMA": ("linear", "llama3"), "QWEN2": ("linear",), "QWEN3": ("linear",), "GPT2": ()}


def export_gguf(
    path: str | Path,
    model: LanguageModel,
    variables: Variables,
    tokenizer: Tokenizer | None,
    *,
    dtype: str = "f32",
    model_type: str | None = None,
) -> None:
    """Writes a GGUF file (see `write_gguf`).

    Args:
        path: The file to create.
        model: The model.
        variables: The model's variables.
        tokenizer: The model's tokenizer.
        dtype: The type of the matrices in the file, "f32" or "q8_0".
        model_type: A key of `ARCHITECTURES`. Defaults to the model's original family, or to the
            first family that can represent the model.

    Raises:
        ValueError: Llama.cpp does not support the model or the tokenizer.
    """
    check_of_config(model)
    gguf = import_optional("gguf", "write GGUF files", "gguf")
    params = checked_params(model, variables)
    families = preferred(model_type, model.model_type, ARCHITECTURES)
    matching, config, _ = counterpart(model.config, families)
    config, architecture = canonical(config), ARCHITECTURES[matching.model_type]
    if tokenizer is None:
        raise ValueError("tokenizer is None, but a GGUF file must contain a tokenizer")
    if architecture == "GEMMA3":
        own = gemma_header(gguf, config)
    else:
        check_supported(config, architecture)
        own = rotary_header(gguf, config)
    words = vocabulary(gguf, tokenizer, config.vocab_size)
    number = getattr(gguf.MODEL_ARCH, architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    leaves, tensors = flat(params), {}
    for entry in entries(matching.rows(config), config, flat_shapes(params)):
        stem, leaf = entry.theirs.rsplit(".", 1)
        tensor = to_gguf_layout(entry, leaves, config, architecture == "LLAMA")
        tensors[f"{names.get_name(stem)}.{leaf}"] = tensor
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "llama3":
        head_dim, base = _rotated(config)
        plain, scaled = (rotary_frequencies(head_dim, base, x)[0] for x in (None, scaling))
        tensors["rope_freqs.weight"] = np.float32(plain / scaled)
    header = sizes(config) | own | words
    write_gguf(path, gguf, gguf.MODEL_ARCH_NAMES[number], header, tensors, dtype)


def to_gguf_layout(
    entry: TensorEntry, leaves: dict, config: TransformerConfig, turns: bool
) -> np.ndarray:
    """Converts a tensor to the layout of GGUF, in which matrices are [outputs, inputs].

    Args:
        entry: The tensor of transformers.
        leaves: jaxformer's parameters by path.
        config: The config of the model.
        turns: Whether to make the two features of each rotary pair adjacent. llama.cpp requires
            this for the architecture LLAMA.
    """
    tensor = np.asarray(entry.to_theirs(leaves), np.float32)
    part = entry.ours[0].split("/")
    if part[-1] == "scale" and config.norm == "rms_one_plus":
        tensor = tensor + 1
    if part[-1] == "kernel" and not entry.is_transposed:
        tensor = tensor.T
    if turns and part[-2] in ("query", "key"):
        heads = tensor.reshape(-1, 2, _rotated(config)[0] // 2, *tensor.shape[1:])
        tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def check_supported(config: TransformerConfig, architecture: str) -> None:
    """Raises ValueError if llama.cpp's implementation of an architecture cannot run the model."""
    required = {"window": None, "rotary_fraction": 1.0, "attention_scale": None}
    if architecture == "GPT2":
        required |= {"activation": "gelu_tanh"}
    if architecture == "QWEN3":
        required |= {"query_key_value_bias": False, "attention_output_bias": False}
    faults = [
        f"{name} is {getattr(config, name)!r}; for GGUF it must be {only!r}"
        for name, only in required.items()
        if getattr(config, name) != only
    ]
    if architecture == "QWEN2" and _rotated(config)[0] * config.num_heads != config.embed_dim:
        product = "head_dim times num_heads must be embed_dim"
        faults.append(f"head_dim is {config.head_dim}; for GGUF, {product}")
    scaling, kinds = config.rotary_scaling, SCALINGS[architecture]
    if scaling is not None and getattr(scaling, "kind", None) not in kinds:
        accepted = f"its type must be {' or '.join(kinds)}"
        faults.append(f"rotary_scaling is {scaling}; for GGUF, {accepted}")
    if faults:
        raise ValueError(f"{faults[0]} (llama.cpp's architecture {architecture})")


def _rotated(config: TransformerConfig) -> tuple[int, float]:
    """Returns head_dim and rotary_base of a config in which all layers have the same settings."""
    # pyrefly: ignore[bad-return] (`canonical` replaces a tuple of equal entries by one number)
    return config.head_dim, config.rotary_base


def write_gguf(
    path: str | Path,
    gguf: ModuleType,
    name: str,
    header: dict[str, Any],
    tensors: dict[str, np.ndarray],
    dtype: str,
) -> None:
    """Writes a GGUF file, atomically.

    Args:
        path: The file to create.
        gguf: The module `gguf`.
        name: The architecture's name in llama.cpp.
        header: {name: value} of the header fields. The method `add_{name}` of `gguf.GGUFWriter`
            writes each field.
        tensors: The arrays by their GGUF names.
        dtype: "f32", or "q8_0" for matrices in blocks of 32 integers with a common scale. A matrix
            whose row length is not divisible by 32 stays float32.

    Raises:
        ValueError: `path` exists.
    """
    path = require_new(Path(path))
    if path.exists():
        raise ValueError(f"{path} is a folder; choose the path of a file")
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, name)
        for key, value in header.items():
            getattr(writer, f"add_{key}")(value)
        for name, tensor in tensors.items():
            is_quantized = dtype == "q8_0" and tensor.ndim == 2 and "_pos" not in name
            if is_quantized and tensor.shape[-1] % 32 == 0:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, np.ascontiguousarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def sizes(config: TransformerConfig) -> dict[str, Any]:
    """Returns the header fields for the sizes of the model."""
    header: dict[str, Any] = {
        "context_length": config.max_length,
        "embedding_length": config.embed_dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp_dim,
        "head_count": config.num_heads,
        "head_count_kv": config.heads[1],
    }
    if config.norm == "layer":
        return header | {"layer_norm_eps": config.norm_epsilon}
    header |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config.head_dim)
    return header | {"layer_norm_rms_eps": config.norm_epsilon}


def rotary_header(gguf: ModuleType, config: TransformerConfig) -> dict[str, Any]:
    """Returns the rotary header fields of a model whose layers have equal rotary settings."""
    if config.norm == "layer":
        return {}
    header: dict[str, Any] = {"rope_freq_base": _rotated(config)[1]}
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "linear":
        header["rope_scaling_type"] = gguf.RopeScalingType.LINEAR
        header["rope_scaling_factor"] = scaling.factor
    return header
