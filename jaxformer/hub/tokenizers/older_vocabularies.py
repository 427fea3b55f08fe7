"""Tokenizers of folders without a `tokenizer.json`, built from older vocabulary files.

The files are those of BERT, GPT-2, T5 and Marian.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.backend import MOST_BYTES
from jaxformer.artifacts.files import read_json, read_text
from jaxformer.hub.tokenizers.sentencepiece import of_marian, of_t5
from jaxformer.hub.tokenizers.settings import (
    CONVERT,
    Kind,
    TokenizerSettings,
    add_tokens,
    check_options,
    read_settings,
)

VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "source.spm")

_WORDPIECE = Kind(
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
    flags={"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None},
    numbers={},
    demanded={
        "do_basic_tokenize": True,
        "clean_text": True,
        "wordpieces_prefix": "##",
        "max_input_chars_per_word": 100,
        "auto_map": None,
    },
    named={
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
)
_GPT2 = Kind(
    classes=("GPT2Tokenizer",),
    flags={"add_prefix_space": False, "add_bos_token": False, "add_eos_token": False},
    numbers={},
    demanded={"auto_map": None},
    named=dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
)
_T5 = Kind(
    classes=("T5Tokenizer", "MT5Tokenizer"),
    flags={},
    numbers={"extra_ids": 100},
    demanded={"add_prefix_space": True, "sp_model_kwargs": {}, "auto_map": None},
    named={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    fixed=("eos_token", "unk_token"),
)
_MARIAN = Kind(
    classes=("MarianTokenizer",),
    flags={},
    numbers={},
    demanded={"separate_vocabs": False, "sp_model_kwargs": {}, "auto_map": None},
    named={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    fixed=("eos_token", "unk_token"),
)


def read_older(folder: Path) -> tokenizers.Tokenizer | None:
    """Builds the tokenizer of a folder from its older vocabulary files.

    Returns:
      The backend, or None if the folder has no vocabulary.

    Raises:
      ValueError: If a file is damaged or too large, if a settings file asks for ids in a
        way that is not implemented, or if the kind of the vocabulary is unknown.
    """
    for name in VOCABULARIES:
        path = folder / name
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    chosen = _kind(folder)
    if chosen is None:
        return None
    kind, build = chosen
    settings = read_settings(folder)
    options = check_options(settings, kind, tokenizer_class(folder, settings))
    try:
        backend = build(folder, options)
        add_tokens(backend, settings, [options[role] for role in kind.named])
        _set_template(backend, _template(kind, options), folder)
        return backend
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"{folder}: its vocabulary cannot be read: {error}") from None


def tokenizer_class(folder: Path, settings: TokenizerSettings) -> Any:
    """Returns the class that tokenizer_config.json names or, without one, config.json."""
    return settings.options.get("tokenizer_class") or _config(folder).get("tokenizer_class")


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def _kind(folder: Path):
    """Returns the schema of the folder's vocabulary and the function that builds its backend."""
    has = {name for name in VOCABULARIES if (folder / name).is_file()}
    model_type = _config(folder).get("model_type")
    if {"vocab.json", "merges.txt"} <= has:
        if model_type != "gpt2":
            raise ValueError(
                f"{folder}: vocab.json and merges.txt alone are enough for GPT-2 only; {CONVERT}"
            )
        return _GPT2, _gpt2
    if "source.spm" in has:
        return _MARIAN, _marian
    if "spiece.model" in has and model_type in ("t5", "mt5"):
        return _T5, _t5
    if "vocab.txt" in has:
        return _WORDPIECE, _wordpiece
    models = sorted([*folder.glob("*.model"), *folder.glob("*.spm")])
    if models:
        raise ValueError(f"{models[0]} is not read; {CONVERT}")
    return None


def _template(kind: Kind, options: dict[str, Any]) -> list[str]:
    """Returns the template of a text (`$A`); an empty list leaves the backend's unchanged."""
    if kind is _WORDPIECE:
        return [options["cls_token"], "$A", options["sep_token"]]
    if kind is _GPT2:
        begin = [options["bos_token"]] * options["add_bos_token"]
        end = [options["eos_token"]] * options["add_eos_token"]
        return [*begin, "$A", *end] if begin or end else []
    return []


def _set_template(backend: tokenizers.Tokenizer, template: list[str], folder: Path) -> None:
    names = dict.fromkeys(x for x in template if x != "$A")
    for name in names:
        if backend.token_to_id(name) is None:
            raise ValueError(
                f"{folder}: its vocabulary has no {name!r}, which its template adds to a text"
            )
    if template:
        ids = [(name, backend.token_to_id(name)) for name in names]
        backend.post_processor = processors.TemplateProcessing(template, None, ids)


def _wordpiece(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "vocab.txt"
    lines = read_text(path).split("\n")
    words = {
        line.rstrip(): number for number, line in enumerate(lines[: None if lines[-1] else -1])
    }
    unknown = options["unk_token"]
    if unknown not in words:
        raise ValueError(f"{path}: it has no {unknown!r}, the token for unknown words")
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options["tokenize_chinese_chars"],
        strip_accents=options["strip_accents"],
        lowercase=options["do_lower_case"],
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _gpt2(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    words, merges = read_json(folder / "vocab.json"), _merges(folder / "merges.txt")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    prefix = options["add_prefix_space"]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(path: Path) -> list[tuple[str, str]]:
    """Reads merges.txt: two tokens a line, the most frequent pair first."""
    merges = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line and not line.startswith("#version"):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise ValueError(f"{path}: line {number} is {line[:80]!r}; it must be two tokens")
            merges.append(pair)
    return merges


def _t5(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    return of_t5(folder / "spiece.model", options["extra_ids"])


def _marian(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    return of_marian(folder / "source.spm", read_json(folder / "vocab.json"))
