"""Tokenizers of folders without a `tokenizer.json`, built from older vocabulary files.

The files are those of BERT, GPT-2, T5 and Marian.
"""

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.files import json_text, read_json, read_optional, read_text
from jaxformer.artifacts.tokenizer_files import CONFIG, GENERIC_CLASS, read_settings_files
from jaxformer.artifacts.untrusted import MOST_BYTES
from jaxformer.hub.tokenizers.sentencepiece import of_marian, of_t5
from jaxformer.hub.tokenizers.settings import (
    CONVERT,
    Schema,
    TokenizerSettings,
    add_tokens,
    check_options,
    read_settings,
)

VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "source.spm")
# Options that name files or code which an exported folder does not have.
_OF_CLASS = """auto_map merges_file name_or_path source_spm special_tokens_map_file target_spm
    target_vocab_file tokenizer_class tokenizer_file vocab_file""".split()
_SENTENCEPIECE = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Older(NamedTuple):
    """Tokenizer built from older vocabulary files, and the text of its settings files."""

    backend: tokenizers.Tokenizer
    settings_files: dict[str, str]


def read_older(folder: Path) -> Older | None:
    """Builds the tokenizer of a folder from its older vocabulary files.

    Returns:
      The tokenizer, or None if the folder has no vocabulary.

    Raises:
      ValueError: If a file is damaged or too large, if a settings file asks for ids in a
        way that is not implemented, or if the kind of the vocabulary is unknown.
    """
    for name in VOCABULARIES:
        path = folder / name
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    if (kind := _kind(folder)) is None:
        return None
    settings = read_settings(folder)
    options = check_options(settings, kind, tokenizer_class(folder, settings))
    try:
        backend = kind.build(folder, options)
        add_tokens(backend, settings, [options[role] for role in kind.named])
        _set_template(backend, kind.template(options), folder)
        return Older(backend, settings_with_defaults(settings, kind, options))
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"{folder}: its vocabulary cannot be read: {error}") from None


def settings_with_defaults(
    settings: TokenizerSettings, kind: Schema, options: dict[str, Any]
) -> dict[str, str]:
    """Returns settings files that state the defaults of the folder's class.

    The class would rebuild the tokenizer from the older vocabulary files. An exported folder has
    tokenizer.json instead, which the generic class reads; that class has no such defaults.

    Args:
      settings: The settings files of the folder.
      kind: The schema of its vocabulary.
      options: The checked options.
    """
    left = {key: x for key, x in settings.options.items() if key not in _OF_CLASS}
    roles = {role: options[role] for role in kind.named if role not in left}
    content = {"model_input_names": list(kind.model_input_names), **roles, **left}
    content["tokenizer_class"] = GENERIC_CLASS
    templates = read_settings_files(settings.folder)
    kept = {name: text for name, text in templates.items() if name.endswith(".jinja")}
    return {CONFIG: json_text(content, indent=2), **kept}


def tokenizer_class(folder: Path, settings: TokenizerSettings) -> Any:
    """Returns the class that tokenizer_config.json names or, without one, config.json."""
    config = read_optional(folder / "config.json")
    return settings.options.get("tokenizer_class") or config.get("tokenizer_class")


def _kind(folder: Path) -> Schema | None:
    """Returns the schema of the folder's vocabulary; None if it has none."""
    has = {name for name in VOCABULARIES if (folder / name).is_file()}
    model_type = read_optional(folder / "config.json").get("model_type")
    if {"vocab.json", "merges.txt"} <= has:
        if model_type != "gpt2":
            raise ValueError(
                f"{folder}: vocab.json and merges.txt alone are enough for GPT-2 only; {CONVERT}"
            )
        return _GPT2
    if "source.spm" in has:
        return _MARIAN
    if "spiece.model" in has and model_type in ("t5", "mt5"):
        return _T5
    if "vocab.txt" in has:
        return _WORDPIECE
    models = sorted([*folder.glob("*.model"), *folder.glob("*.spm")])
    if models:
        raise ValueError(f"{models[0]} is not read; {CONVERT}")
    return None


def _set_template(backend: tokenizers.Tokenizer, template: list[str], folder: Path) -> None:
    ids = {name: backend.token_to_id(name) for name in template if name != "$A"}
    for name, token in ids.items():
        if token is None:
            raise ValueError(
                f"{folder}: its vocabulary has no {name!r}, which its template adds to a text"
            )
    if template:
        backend.post_processor = processors.TemplateProcessing(template, None, list(ids.items()))


def _wordpiece(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "vocab.txt"
    lines = read_text(path).removesuffix("\n").split("\n")
    words = {line.rstrip(): number for number, line in enumerate(lines)}
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
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options["add_prefix_space"])
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


def _gpt2_template(options: dict[str, Any]) -> list[str]:
    begin = [options["bos_token"]] * options["add_bos_token"]
    end = [options["eos_token"]] * options["add_eos_token"]
    return [*begin, "$A", *end] if begin or end else []


_WORDPIECE = Schema(
    classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
    build=_wordpiece,
    demanded={
        "do_basic_tokenize": True,
        "clean_text": True,
        "wordpieces_prefix": "##",
        "max_input_chars_per_word": 100,
        "auto_map": None,
    },
    named={f"{x}_token": f"[{x.upper()}]" for x in ("unk", "sep", "pad", "cls", "mask")},
    flags={"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None},
    model_input_names=("input_ids", "token_type_ids", "attention_mask"),
    template=lambda options: [options["cls_token"], "$A", options["sep_token"]],
)
_GPT2 = Schema(
    classes=("GPT2Tokenizer",),
    build=_gpt2,
    demanded={"auto_map": None},
    named=dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    flags={"add_prefix_space": False, "add_bos_token": False, "add_eos_token": False},
    template=_gpt2_template,
)
_T5 = Schema(
    classes=("T5Tokenizer", "MT5Tokenizer"),
    build=lambda folder, options: of_t5(folder / "spiece.model", options["extra_ids"]),
    demanded={"add_prefix_space": True, "sp_model_kwargs": {}, "auto_map": None},
    named=_SENTENCEPIECE,
    numbers={"extra_ids": 100},
    fixed=("eos_token", "unk_token"),
)
_MARIAN = Schema(
    classes=("MarianTokenizer",),
    build=lambda folder, _: of_marian(folder / "source.spm", read_json(folder / "vocab.json")),
    demanded={"separate_vocabs": False, "sp_model_kwargs": {}, "auto_map": None},
    named=_SENTENCEPIECE,
    fixed=("eos_token", "unk_token"),
)
