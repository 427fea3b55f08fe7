"""Export of a model to a GGUF file for llama.cpp: GPT-2, Llama, Mistral, Qwen 2 and 3.

The `gguf` package writes the file. It maps the tensor names of transformers to those of the format.

llama.cpp has two algorithms for BPE. "gpt2" merges the bytes of a word by a list of merges; the key
"pre" names a fixed pattern that divides a text into words. "llama" merges the characters of a whole
text by the scores of the resulting tokens, as sentencepiece does.
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
from jaxformer.artifacts.saved import check_layers_of_config, checked_params
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tensors import flat, flat_shapes
from jaxformer.artifacts.tokenizer import Tokenizer, steps_of
from jaxformer.artifacts.tokenizer_files import CONFIG, MAP, TEMPLATE, TEMPLATES
from jaxformer.functional.positions import rotary_frequencies
from jaxformer.hub.export import counterpart, preferred
from jaxformer.hub.family import canonical
from jaxformer.hub.table import TensorEntry, entries
from jaxformer.models.config import RotaryScaling
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.language_model import LanguageModel, Variables

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

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
# Patterns of pre-tokenizers as published tokenizer.json files spell them.
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
# (patterns in the order in which they divide a text, ignore_merges): llama.cpp's name.
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
    families = preferred(family, model.family, ARCHITECTURES)
    matching, config, _ = counterpart(model.config, families)
    config, architecture = canonical(config), ARCHITECTURES[matching.model_type]
    if tokenizer is None:
        raise ValueError("tokenizer is None; a GGUF file needs one")
    check_supported(config, architecture)
    words = vocabulary(gguf, tokenizer, config.vocab_size)
    number = getattr(gguf.MODEL_ARCH, architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    leaves, tensors = flat(params), {}
    for entry in entries(matching.rows(config), config, flat_shapes(params)):
        stem, leaf = entry.theirs.rsplit(".", 1)
        tensor = of_file(entry, leaves, config, architecture == "LLAMA")
        tensors[f"{names.get_name(stem)}.{leaf}"] = tensor
    scaling = config.rotary_scaling
    if isinstance(scaling, RotaryScaling) and scaling.kind == "llama3":
        head_dim, base = _rotated(config)
        plain, scaled = (rotary_frequencies(head_dim, base, x)[0] for x in (None, scaling))
        tensors["rope_freqs.weight"] = np.float32(plain / scaled)
    header = sizes(gguf, config) | words
    write_gguf(path, gguf, gguf.MODEL_ARCH_NAMES[number], header, tensors, dtype)


def of_file(entry: TensorEntry, leaves: dict, config: TransformerConfig, turns: bool) -> np.ndarray:
    """Returns a tensor in the file's layout.

    Matrices are [outputs, inputs]. With `turns`, for Llama, the two features of a rotary pair are
    neighbours.
    """
    tensor = np.asarray(entry.to_theirs(leaves), np.float32)
    part = entry.ours[0].split("/")
    if part[-1] == "kernel" and not entry.is_transposed:
        tensor = tensor.T
    if turns and part[-2] in ("query", "key"):  # llama.cpp rotates neighbouring rows of a head
        heads = tensor.reshape(-1, 2, _rotated(config)[0] // 2, *tensor.shape[1:])
        tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def check_supported(config: TransformerConfig, architecture: str) -> None:
    """Raises ValueError if an architecture of llama.cpp cannot run the model."""
    required = {"window": None, "rotary_fraction": 1.0, "attention_scale": None}
    if architecture == "GPT2":
        required |= {"activation": "gelu_tanh"}
    if architecture == "QWEN3":
        required |= {"query_key_value_bias": False, "attention_output_bias": False}
    faults = [
        f"{name} is {getattr(config, name)!r}; in GGUF it must be {only!r}"
        for name, only in required.items()
        if getattr(config, name) != only
    ]
    if architecture == "QWEN2" and _rotated(config)[0] * config.num_heads != config.embed_dim:
        product = "head_dim times num_heads must be embed_dim"
        faults.append(f"head_dim is {config.head_dim}; in GGUF {product}")
    scaling, kinds = config.rotary_scaling, SCALINGS[architecture]
    if scaling is not None and getattr(scaling, "kind", None) not in kinds:
        accepted = f"its kind must be {' or '.join(kinds)}"
        faults.append(f"rotary_scaling is {scaling}; in GGUF {accepted}")
    if faults:
        raise ValueError(f"{faults[0]} for a model of llama.cpp's architecture {architecture}")


def _rotated(config: TransformerConfig) -> tuple[int, float]:
    """Returns head_dim and rotary_base of a canonical config without patterns."""
    # pyrefly: ignore[bad-return] (a canonical config is resolved)
    return config.head_dim, config.rotary_base


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
    gguf: ModuleType,
    name: str,
    header: dict[str, Any],
    tensors: dict[str, np.ndarray],
    dtype: str,
) -> None:
    """Writes a GGUF file, atomically.

    Args:
        path: The file to create.
        gguf: The package.
        name: llama.cpp's name of the architecture.
        header: Values of the header. `add_…` of the package's writer is called with each.
        tensors: Arrays by their GGUF names.
        dtype: "f32", or "q8_0" for matrices (blocks of 32 integers with one scale). A matrix
            whose rows 32 does not divide stays float32.

    Raises:
        ValueError: If `path` exists.
    """
    path = require_new(Path(path))
    if path.exists():
        raise ValueError(f"{path} is a folder; name a file")
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
    """Returns the sizes and constants of the architecture, as values of the header."""
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
    """Returns the vocabulary of a tokenizer, as values of the header.

    Args:
        gguf: The package.
        tokenizer: The tokenizer.
        vocab_size: Number of ids of the model.

    Raises:
        ValueError: If llama.cpp cannot encode as the tokenizer does. The message names the part.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model["type"] != "BPE":
        raise ValueError(f"tokenizer is {model['type']}; only BPE can be exported to GGUF")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise ValueError(f"tokenizer has {name} {model[name]!r}; in GGUF it must have none")
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps_of(parts, "pre_tokenizer"))
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
    """Returns the name of a token's type."""
    if token not in words and token not in added:
        return "UNUSED"
    if not is_of_bytes and words.get(token) == model.get("unk_token"):
        return "UNKNOWN"
    if token in added:
        return "CONTROL" if added[token]["special"] else "USER_DEFINED"
    return "BYTE" if not is_of_bytes and _BYTE.fullmatch(words[token]) else "NORMAL"


# ---- byte-level BPE


def _pre(parts: dict) -> str:
    """Returns llama.cpp's name of the pattern that divides a text before byte-level BPE."""
    for step in steps_of(parts, "normalizer"):
        if step["type"] != "NFC":  # llama.cpp has no NFC, but most texts have this form already
            raise ValueError(f"tokenizer has the normalizer {step['type']}; in GGUF it must be NFC")
    patterns = tuple(filter(None, map(_pattern, steps_of(parts, "pre_tokenizer"))))
    key = (patterns, bool(parts["model"].get("ignore_merges")))
    if key not in _PRE:
        named = " and ".join(map(repr, patterns))
        raise ValueError(
            f"tokenizer divides a text by {named} (ignore_merges is {key[1]}); in GGUF it must be "
            "as in GPT-2, SmolLM, Qwen 2, Llama 3 or Tekken"
        )
    return _PRE[key]


def _pattern(step: dict) -> str:
    """Returns the pattern of a pre-tokenizer; "" if it does not divide a text."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return _GPT2 if step.get("use_regex", True) else ""
    if step["type"] == "Digits" and step.get("individual_digits"):
        return _DIGIT
    how = (step.get("behavior"), step.get("invert", False))
    if step["type"] == "Split" and how in (("Isolated", False), ("Removed", True)):
        return step["pattern"].get("Regex", repr(step["pattern"]))
    raise ValueError(f"tokenizer has the pre-tokenizer {step}, which llama.cpp lacks")


# ---- BPE of sentencepiece


def _space_prefix(parts: dict) -> bool:
    """Returns whether a space is put before a text; raises ValueError for unknown steps."""
    prefix, marks = False, False
    for step in steps_of(parts, "normalizer"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step["type"] == "Replace" and step["content"] == _SPACE:
            marks = step["pattern"] == {"String": " "}
        else:
            raise ValueError(f"tokenizer has the normalizer {step['type']}, which GGUF lacks")
    for step in steps_of(parts, "pre_tokenizer"):
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE:
            prefix |= step.get("prepend_scheme", "always") != "never"
            marks = True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "}:
            raise ValueError(f"tokenizer has the pre-tokenizer {step['type']}, which GGUF lacks")
    if not marks or not parts["model"].get("byte_fallback"):
        raise ValueError(
            "tokenizer is BPE over characters; in GGUF it must be byte-level BPE, or BPE of "
            "sentencepiece with byte_fallback and ▁ for spaces"
        )
    return prefix


def _scores(tokens: list[str], types: list[str], merges: Iterable[tuple]) -> list[float]:
    """Returns a score for each token: the earlier its first merge, the higher."""
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
    """Warns if llama.cpp merges two tokens that the tokenizer does not merge."""
    known = set(merges)
    for text in vocab:
        for place in range(1, 0 if _BYTE.fullmatch(text) else len(text)):
            pair = text[:place], text[place:]
            if pair not in known and pair[0] in vocab and pair[1] in vocab:
                warnings.warn(
                    f"tokenizer has the tokens {pair[0]!r}, {pair[1]!r} and {text!r} but no merge "
                    "of the first two; llama.cpp merges them, so some texts get other ids there",
                    stacklevel=4,
                )
                return


# ---- special tokens and chat templates


def _special(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int | bool]:
    """Returns the ids of special tokens, and which of them are put around a text."""
    if not isinstance(tokenizer, Subwords):  # our own: the end of text also begins the next one
        (end,) = tokenizer.stop_tokens
        return {"bos_token_id": end, "eos_token_id": end, "add_bos_token": True}
    named = _named(tokenizer)
    special, before, after = tokenizer.special, tokenizer.before, tokenizer.after
    begin = before[0] if before else named.get("bos_token", special.begin)
    stops = [*([named["eos_token"]] if "eos_token" in named else ()), *special.stop_tokens]
    end = after[-1] if after else next(iter(stops), None)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"tokenizer puts the ids {before} before and {after} after a text; in GGUF it must be "
            "at most one id each"
        )
    roles = {"bos": begin, "eos": end}
    roles["eot"] = next((x for x in stops if x != end), None)  # another token that ends a reply
    roles |= {role.removesuffix("_token"): named.get(role) for role in _ROLES}
    roles["pad"] = special.pad if roles["pad"] is None else roles["pad"]
    ids = {f"{role}_token_id": x for role, x in roles.items() if x is not None and x < vocab_size}
    return ids | {"add_bos_token": bool(before), "add_eos_token": bool(after)}


def _named(tokenizer: Subwords) -> dict[str, int]:
    """Returns the ids of the special tokens that the settings files name, by role."""
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
    """Returns the chat template, or a list of named ones; None if there is none."""
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
