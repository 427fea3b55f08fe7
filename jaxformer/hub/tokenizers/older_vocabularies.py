"""Tokenizers of folders without a `tokenizer.json`, built from older vocabulary files.

The vocabulary files of BERT, GPT-2, T5 and Marian are supported. Unlike a `tokenizer.json`, these
files do not fully determine the ids of a text, because options in settings files can also change
ids. An option in a settings file raises an error, unless it is implemented or cannot change ids.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.files import json_text, read_json, read_optional, read_text
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.tokenizer_files import ADDED, CONFIG, GENERIC_CLASS, read_settings_files
from jaxformer.artifacts.untrusted import MOST_BYTES
from jaxformer.hub.options import Options
from jaxformer.hub.tokenizers.sentencepiece import marian_tokenizer, t5_tokenizer
from jaxformer.hub.tokenizers.settings import LISTS, TokenizerSettings, read_settings

VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "source.spm")
# Options that refer to files or code of the original folder, which an exported folder does not
# contain.
_OF_CLASS = """auto_map merges_file name_or_path source_spm special_tokens_map_file target_spm
    target_vocab_file tokenizer_class tokenizer_file vocab_file""".split()
_SENTENCEPIECE = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Options that cannot change the ids of a text. These options concern the length and padding of
# batches, chat templates, file paths, versions, and decoding. `split_special_tokens` has no effect,
# because jaxformer always encodes the text of a special token as plain text.
HARMLESS_SETTINGS = frozenset(
    """
    _commit_hash backend chat_control_tokens chat_template clean_up_tokenization_spaces errors
    files_loaded is_local legacy legacy_behaviour local_files_only max_len max_length merges_file
    model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id
    padding_side processor_class response_schema response_template return_token_type_ids source_lang
    source_spm special_tokens_map_file spaces_between_special_tokens split_special_tokens stride
    target_lang target_spm target_vocab_file tokenizer_file transformers_version trim_offsets
    truncation truncation_side truncation_strategy use_default_system_prompt use_fast verbose vocab
    vocab_file
    """.split()
)
CONVERT = (
    "to convert the vocabulary to tokenizer.json, run once in Python, with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
_OWN = frozenset({"tokenizer_class", "added_tokens_decoder", *LISTS})


@dataclass(frozen=True)
class Schema:
    """Options that the tokenizer classes for one vocabulary format accept.

    Attributes:
        classes: The names of the tokenizer classes in transformers that read this format.
        build: Function (folder, checked options) → tokenizer of the folder.
        named: {role of a special token, such as "eos_token": the default token}.
        demanded: {option: the only implemented value}.
        defaults: {implemented option: default}; a default is an integer, a bool or None.
        fixed: The roles of special tokens for which only the default token is accepted.
        template: Function (checked options) → tokens of a template, in which `$A` is the text. If
            the list of tokens is empty, the template that `build` set remains unchanged.
        model_input_names: The default of the option `model_input_names`.
    """

    classes: tuple[str, ...]
    build: Callable[[Path, dict[str, Any]], tokenizers.Tokenizer]
    named: dict[str, str]
    demanded: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, bool | int | None] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    template: Callable[[dict[str, Any]], list[str]] = lambda options: []
    model_input_names: tuple[str, ...] = ("input_ids", "attention_mask")


def read_older(folder: Path, special: SpecialTokens) -> Subwords | None:
    """Builds the tokenizer of a folder from its older vocabulary files.

    Args:
        folder: The folder.
        special: The special ids of the model.

    Returns:
        The tokenizer, or None if the folder contains no vocabulary.

    Raises:
        ValueError: A file is damaged or too large, a settings file sets an option that is not
            implemented and may change ids, or the vocabulary format is unknown.
    """
    for name in VOCABULARIES:
        path = folder / name
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise ValueError(
                f"{path} has more than {MOST_BYTES} bytes; larger files are not loaded"
            )
    if (kind := _kind(folder)) is None:
        return None
    settings = read_settings(folder)
    options = check_options(settings, kind)
    try:
        backend = kind.build(folder, options)
        add_tokens(backend, settings, [options[role] for role in kind.named])
        _set_template(backend, kind.template(options), folder)
    except ValueError:
        raise
    except Exception as error:  # The library raises Exception for a malformed file.
        raise ValueError(f"{folder}: its vocabulary cannot be read: {error}") from None
    return Subwords(backend, special, settings_with_defaults(settings, kind, options))


def settings_with_defaults(
    settings: TokenizerSettings, kind: Schema, options: dict[str, Any]
) -> dict[str, str]:
    """Returns the settings files for an exported folder, including the defaults of the class.

    An exported folder contains a tokenizer.json, which the generic tokenizer class of transformers
    reads. The generic class does not know the defaults of the original tokenizer class, so the
    settings files contain these defaults.

    Args:
        settings: The settings files of the folder that was loaded.
        kind: The schema of the vocabulary that was loaded.
        options: The options that `check_options` returned.
    """
    left = {key: x for key, x in settings.options.items() if key not in _OF_CLASS}
    roles = {role: options[role] for role in kind.named if role not in left}
    content = {"model_input_names": list(kind.model_input_names), **roles, **left}
    content["tokenizer_class"] = GENERIC_CLASS
    templates = read_settings_files(settings.folder)
    kept = {name: text for name, text in templates.items() if name.endswith(".jinja")}
    return {CONFIG: json_text(content, indent=2), **kept}


def _kind(folder: Path) -> Schema | None:
    """Returns the schema of the folder's vocabulary, or None if the folder has no vocabulary."""
    has = {name for name in VOCABULARIES if (folder / name).is_file()}
    model_type = read_optional(folder / "config.json").get("model_type")
    if {"vocab.json", "merges.txt"} <= has:
        if model_type != "gpt2":
            raise ValueError(
                f"{folder}: vocab.json and merges.txt alone suffice only for GPT-2; {CONVERT}"
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
        raise ValueError(f"{models[0]} has an unsupported format; {CONVERT}")
    return None


def _set_template(backend: tokenizers.Tokenizer, template: list[str], folder: Path) -> None:
    ids = {name: backend.token_to_id(name) for name in template if name != "$A"}
    for name, token in ids.items():
        if token is None:
            raise ValueError(
                f"{folder}: the vocabulary does not contain {name!r}, which the tokenizer adds to "
                "every text"
            )
    if template:
        backend.post_processor = processors.TemplateProcessing(template, None, list(ids.items()))


def check_options(settings: TokenizerSettings, kind: Schema) -> dict[str, Any]:
    """Checks tokenizer_config.json against the schema of a vocabulary format.

    Args:
        settings: The settings files.
        kind: The schema of the vocabulary format.

    Returns:
        A dict with the value of each option in `kind.defaults`, and with the text of the special
        token for each role in `kind.named`.

    Raises:
        ValueError: An option that is not implemented may change ids.
    """
    config = read_optional(settings.folder / "config.json")
    named_class = settings.options.get("tokenizer_class") or config.get("tokenizer_class")
    if named_class is not None and str(named_class).removesuffix("Fast") not in kind.classes:
        accepted = ", ".join(kind.classes)
        raise ValueError(
            f"{settings.folder}: tokenizer_class is {named_class!r}, but this vocabulary needs "
            f"{accepted}; {CONVERT}"
        )
    options = Options(settings.options, settings.folder / CONFIG)
    own = [key for key in settings.options if key.endswith("_token")]
    try:
        checked: dict[str, Any] = {}
        for key, default in kind.defaults.items():
            is_number = type(default) is int
            read = partial(options.whole, most=1000) if is_number else options.flag
            checked[key] = read(key, default)
        options.require(kind.demanded)
        options.nothing_left(HARMLESS_SETTINGS.union(_OWN, own))
        names = kind.named | {k: x.content for k, x in settings.named.items() if k in kind.named}
        for key in kind.fixed:
            if names[key] != kind.named[key]:
                raise options.error(key, f"only {kind.named[key]!r} is implemented")
    except ValueError as error:
        raise ValueError(f"{error}; {CONVERT}") from None
    return checked | names


def add_tokens(
    backend: tokenizers.Tokenizer, settings: TokenizerSettings, own: Iterable[str]
) -> None:
    """Adds the tokens of the settings files to a tokenizer, in the order of their ids.

    Args:
        backend: The tokenizer, which is modified.
        settings: The settings files.
        own: The special tokens of the tokenizer class. Special tokens outside the vocabulary are
            not added.

    Raises:
        ValueError: The id of a token in the settings file differs from its id in the tokenizer.
    """
    roles = {token.content for token in settings.named.values()}.union(own)
    for token in settings.added.values():
        token.special = token.special or token.content in roles
    backend.add_tokens([token for _, token in sorted(settings.added.items())])
    for number, token in sorted(settings.added.items()):
        place = backend.token_to_id(token.content)
        if place != number:
            name = CONFIG if settings.options.get("added_tokens_decoder") is not None else ADDED
            raise ValueError(
                f"{settings.folder / name}: the added token {token.content!r} has the id {number}, "
                f"but the vocabulary requires the id {place}"
            )
    further = [AddedToken(x, special=True) for x in own if backend.token_to_id(x) is not None]
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in (*further, *settings.named.values(), *settings.extra):
        if token.content not in there:
            backend.add_special_tokens([token])


def _wordpiece(folder: Path, options: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "vocab.txt"
    lines = read_text(path).removesuffix("\n").split("\n")
    words = {line.rstrip(): number for number, line in enumerate(lines)}
    unknown = options["unk_token"]
    if unknown not in words:
        raise ValueError(f"{path} must contain {unknown!r}, the token for unknown words")
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
    """Reads merges.txt, which has two tokens per line, the most frequent pair first."""
    merges = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line and not line.startswith("#version"):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise ValueError(
                    f"{path}: line {number} is {line[:80]!r}; it must contain two tokens"
                )
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
    },
    named={f"{x}_token": f"[{x.upper()}]" for x in ("unk", "sep", "pad", "cls", "mask")},
    defaults={"do_lower_case": True, "tokenize_chinese_chars": True, "strip_accents": None},
    model_input_names=("input_ids", "token_type_ids", "attention_mask"),
    template=lambda options: [options["cls_token"], "$A", options["sep_token"]],
)
_GPT2 = Schema(
    classes=("GPT2Tokenizer",),
    build=_gpt2,
    named=dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    defaults={"add_prefix_space": False, "add_bos_token": False, "add_eos_token": False},
    template=_gpt2_template,
)
_T5 = Schema(
    classes=("T5Tokenizer", "MT5Tokenizer"),
    build=lambda folder, options: t5_tokenizer(folder / "spiece.model", options["extra_ids"]),
    demanded={"add_prefix_space": True, "sp_model_kwargs": {}},
    named=_SENTENCEPIECE,
    defaults={"extra_ids": 100},
    fixed=("eos_token", "unk_token"),
)
_MARIAN = Schema(
    classes=("MarianTokenizer",),
    build=lambda folder, _: marian_tokenizer(
        folder / "source.spm", read_json(folder / "vocab.json")
    ),
    demanded={"separate_vocabs": False, "sp_model_kwargs": {}},
    named=_SENTENCEPIECE,
    fixed=("eos_token", "unk_token"),
)
