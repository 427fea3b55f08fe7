"""Export of a model to a GGUF file for llama.cpp: GPT-2, Llama, Mistral, Qwen 2 and 3.

The `gguf` package writes the file and converts the tensor names of transformers to those of GGUF.

llama.cpp has two algorithms for BPE. The algorithm "gpt2" merges the bytes of each word according
to a list of merges; the header field "pre" selects a fixed pattern that splits a text into words.
The algorithm "llama" merges the characters of the whole text according to the scores of the tokens,
as sentencepiece does.
"""

import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxformer.artifacts.files import parse_json, replacing, require_new
from jaxformer.artifacts.saved import check_of_config, checked_params
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_files import CONFIG, MAP, TEMPLATE, TEMPLATES
from jaxformer.artifacts.tokenizer_parts import list_steps
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.hub.checkpoint_format import canonical
from jaxformer.hub.export import counterpart, preferred
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
}

# The types of rotary scaling that llama.cpp implements for each architecture. "llama3" scaling
# needs a tensor of factors per frequency, which only the architecture LLAMA reads.
SCALINGS = {"LLAMA": ("linear", "llama3"), "QWEN2": ("linear",), "QWEN3": ("linear",), "GPT2": ()}

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
# Patterns of pre-tokenizers, exactly as in published tokenizer.json files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS, _DIGIT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\p{N}"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + _DIGIT + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {(patterns in the order in which the tokenizer applies them, ignore_merges): name in llama.cpp}.
_PRE = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_TEKKEN,), True): "tekken",
}
_ROLES = ("unk_token", "sep_token", "pad_token", "mask_token")


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
    check_supported(config, architecture)
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
    header = sizes(gguf, config) | words
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
        raise ValueError(f"{faults[0]} for a model of llama.cpp's architecture {architecture}")


def _rotated(config: TransformerConfig) -> tuple[int, float]:
    """Returns head_dim and rotary_base of a config whose layers are all equal."""
    # pyrefly: ignore[bad-return] (`canonical` returns plain numbers for equal layers)
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


def sizes(gguf: ModuleType, config: TransformerConfig) -> dict[str, Any]:
    """Returns the header fields for the sizes and constants of the architecture."""
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
    head_dim, rotary_base = _rotated(config)
    header |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head_dim)
    header |= {"layer_norm_rms_eps": config.norm_epsilon, "rope_freq_base": rotary_base}
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "linear":
        header["rope_scaling_type"] = gguf.RopeScalingType.LINEAR
        header["rope_scaling_factor"] = scaling.factor
    return header


# ---- the vocabulary


def vocabulary(gguf: ModuleType, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Returns the header fields for the vocabulary of a tokenizer.

    Args:
        gguf: The module `gguf`.
        tokenizer: The tokenizer.
        vocab_size: The model's vocabulary size.

    Raises:
        ValueError: Llama.cpp would encode texts differently from `tokenizer`. The message names
            the unsupported part of the tokenizer.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model["type"] != "BPE":
        raise ValueError(
            f"the tokenizer's type is {model['type']}; only BPE can be exported to GGUF"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise ValueError(f"tokenizer has {name} {model[name]!r}, which GGUF does not support")
    is_of_bytes = any(step["type"] == "ByteLevel" for step in list_steps(parts, "pre_tokenizer"))
    words = {token: word for word, token in model["vocab"].items()}
    added = {entry["id"]: entry for entry in parts["added_tokens"]}
    names = words | {token: entry["content"] for token, entry in added.items()}
    tokens = [names.get(token, f"<unused{token}>") for token in range(vocab_size)]
    types = [_type(token, words, added, model, is_of_bytes) for token in range(vocab_size)]
    header = {
        "token_list": tokens,
        "token_types": [gguf.TokenType[name] for name in types],
        **_special(tokenizer, vocab_size),
    }
    if (template := _chat_template(tokenizer)) is not None:
        header["chat_template"] = template
    pairs = [tuple(x.split(" ", 1)) if isinstance(x, str) else tuple(x) for x in model["merges"]]
    if is_of_bytes:
        merges = [" ".join(pair) for pair in pairs]
        return {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": _pre(parts),
            "token_merges": merges,
            **header,
        }
    prefix = _space_prefix(parts)
    _warn_of_missing_merges(model["vocab"], pairs)
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_scores": _scores(tokens, types, pairs),
        "add_space_prefix": prefix,
        "remove_extra_whitespaces": False,
        **header,
    }


def _type(token: int, words: dict, added: dict, model: dict, is_of_bytes: bool) -> str:
    """Returns the GGUF name of a token's type."""
    if token not in words and token not in added:
        return "UNUSED"
    if not is_of_bytes and words.get(token) == model.get("unk_token"):
        return "UNKNOWN"
    if token in added:
        return "CONTROL" if added[token]["special"] else "USER_DEFINED"
    return "BYTE" if not is_of_bytes and _BYTE.fullmatch(words[token]) else "NORMAL"


# ---- byte-level BPE


def _pre(parts: dict) -> str:
    """Returns llama.cpp's name for the pattern that splits a text before byte-level BPE."""
    # llama.cpp does not implement NFC. NFC is accepted, because most texts are already in NFC.
    for step in list_steps(parts, "normalizer"):
        if step["type"] != "NFC":
            raise ValueError(
                f"tokenizer has the normalizer {step['type']}; for GGUF it must be NFC"
            )
    patterns = tuple(filter(None, map(_pattern, list_steps(parts, "pre_tokenizer"))))
    key = (patterns, bool(parts["model"].get("ignore_merges")))
    if key not in _PRE:
        named = " and ".join(map(repr, patterns))
        raise ValueError(
            f"tokenizer splits texts by the pattern {named} (ignore_merges is {key[1]}); for GGUF, "
            "pattern and ignore_merges must be as in GPT-2, SmolLM, Qwen 2, Llama 3 or Tekken"
        )
    return _PRE[key]


def _pattern(step: dict) -> str:
    """Returns the pattern of a pre-tokenizer, or "" if the pre-tokenizer does not split texts."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return _GPT2 if step.get("use_regex", True) else ""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return _DIGIT
    how = (step.get("behavior"), step.get("invert", False))
    if step["type"] == "Split" and how in (("Isolated", False), ("Removed", True)):
        return step["pattern"].get("Regex", repr(step["pattern"]))
    raise ValueError(f"tokenizer has the pre-tokenizer {step}, which llama.cpp lacks")


# ---- BPE with byte fallback


def _space_prefix(parts: dict) -> bool:
    """Returns whether the tokenizer adds a space before a text.

    Raises:
        ValueError: GGUF does not support the tokenizer's normalizer or pre-tokenizer.
    """
    prefix, marks = False, False
    for step in list_steps(parts, "normalizer"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step["type"] == "Replace" and step["content"] == _SPACE:
            marks = step["pattern"] == {"String": " "}
        else:
            raise ValueError(
                f"tokenizer has the normalizer {step['type']}, which GGUF does not support"
            )
    for step in list_steps(parts, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE:
            prefix |= step.get("prepend_scheme", "always") != "never"
            marks = True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "}:
            raise ValueError(
                f"tokenizer has the pre-tokenizer {step['type']}, which GGUF does not support"
            )
    if not marks or not parts["model"].get("byte_fallback"):
        raise ValueError(
            "tokenizer is BPE over characters; in GGUF it must be byte-level BPE, or BPE of "
            "sentencepiece with byte_fallback and ▁ for spaces"
        )
    return prefix


def _scores(tokens: list[str], types: list[str], merges: Iterable[tuple]) -> list[float]:
    """Returns a score for each token; a token from an earlier merge has a larger score."""
    order = dict.fromkeys(left + right for left, right in merges)
    score = {text: -float(place) for place, text in enumerate(order)}
    plain = [text for text, kind in zip(tokens, types, strict=True) if kind == "NORMAL"]
    single = [text for text in plain if text not in score]
    score |= {text: -float(len(order) + place) for place, text in enumerate(single)}
    return [
        score.get(text, 0.0) if kind == "NORMAL" else 0.0
        for text, kind in zip(tokens, types, strict=True)
    ]


def _warn_of_missing_merges(vocab: dict[str, int], merges: list[tuple]) -> None:
    """Warns if llama.cpp would merge two tokens that the tokenizer never merges."""
    known = set(merges)
    for text in vocab:
        for place in range(1, 0 if _BYTE.fullmatch(text) else len(text)):
            pair = text[:place], text[place:]
            if pair not in known and pair[0] in vocab and pair[1] in vocab:
                warnings.warn(
                    f"tokenizer does not merge {pair[0]!r} and {pair[1]!r} to {text!r}; "
                    "llama.cpp does, so it encodes some texts differently",
                    stacklevel=4,
                )
                return


# ---- special tokens and chat templates


def _special(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int | bool]:
    """Returns the header fields for special tokens, and for tokens that are added to every text."""
    if not isinstance(tokenizer, Subwords):
        # In jaxformer's own tokenizers, the token end_of_text also begins a text.
        (end,) = tokenizer.stop_tokens
        return {"bos_token_id": end, "eos_token_id": end, "add_bos_token": True}
    named = _named(tokenizer)
    special, before, after = tokenizer.special, tokenizer.before, tokenizer.after
    begin = before[0] if before else named.get("bos_token", special.begin)
    stops = [*([named["eos_token"]] if "eos_token" in named else ()), *special.stop_tokens]
    end = after[-1] if after else next(iter(stops), None)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"tokenizer adds the ids {before} before a text and {after} after it; in GGUF, a "
            "tokenizer can add at most one id at each end"
        )
    roles = {"bos": begin, "eos": end}
    # "eot" is a second token that ends a reply.
    roles["eot"] = next((x for x in stops if x != end), None)
    roles |= {role.removesuffix("_token"): named.get(role) for role in _ROLES}
    roles["pad"] = special.pad if roles["pad"] is None else roles["pad"]
    ids = {f"{role}_token_id": x for role, x in roles.items() if x is not None and x < vocab_size}
    return ids | {"add_bos_token": bool(before), "add_eos_token": bool(after)}


def _named(tokenizer: Subwords) -> dict[str, int]:
    """Returns the ids of the special tokens in the settings files, by role."""
    files = tokenizer.settings_files
    options: dict[str, Any] = parse_json(files.get(CONFIG, "{}"))
    if options.get("added_tokens_decoder") is None:
        options |= parse_json(files.get(MAP, "{}"))
    named = {}
    for role in ("bos_token", "eos_token", *_ROLES):
        value = options.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        token = tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token is not None:
            named[role] = token
    return named


def _chat_template(tokenizer: Tokenizer) -> Any:
    """Returns the chat template, a list of named chat templates, or None."""
    files = tokenizer.settings_files if isinstance(tokenizer, Subwords) else {}
    if TEMPLATE not in files:
        template = parse_json(files.get(CONFIG, "{}")).get("chat_template")
        return template if isinstance(template, str | list) else None
    prefix = f"{TEMPLATES}/"
    further = {x.removeprefix(prefix)[:-6]: x for x in files if x.startswith(prefix)}
    if not further:
        return files[TEMPLATE]
    named = {"default": TEMPLATE, **further}
    return [{"name": name, "template": files[path]} for name, path in named.items()]
