"""Tokenizers of folders without a `tokenizer.json`, built from older vocabulary files.

The files are those of BERT, GPT-2, T5 and Marian. A `tokenizer.json` holds everything that decides
the ids of a text. These files do not, so the settings files beside them are read through a closed
schema: each option is implemented, known not to change ids, or refused by name.
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
from jaxformer.hub.tokenizers.sentencepiece import of_marian, of_t5
from jaxformer.hub.tokenizers.settings import LISTS, TokenizerSettings, read_settings

VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "source.spm")
# Options that name files or code which an exported folder does not have.
_OF_CLASS = """auto_map merges_file name_or_path source_spm special_tokens_map_file target_spm
    target_vocab_file tokenizer_class tokenizer_file vocab_file""".split()
_SENTENCEPIECE = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Options that cannot change the ids of a text. They concern the length and the padding of batches,
# chat templates, file paths, versions, and decoding. `split_special_tokens` is always true here: a
# special token that is spelled out in a text is plain text.
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
    "convert it once: in Python, with transformers, "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes tokenizer.json"
)
_OWN = frozenset({"tokenizer_class", "added_tokens_decoder", *LISTS})


@dataclass(frozen=True)
class Schema:
    """Options that the tokenizer classes of one kind of vocabulary accept.

    Attributes:
      classes: Names of the tokenizer classes that give the same ids.
      build: Returns the backend of a folder from the checked options.
      named: Roles of the class's special tokens, with the default tokens.
      demanded: Options of which only one value is implemented, with that value.
      defaults: Options with their defaults: a whole number, or one of true, false and null.
      fixed: Roles whose token cannot be changed.
      template: Returns the template of a text (`$A`) from the checked options; an empty list leaves
        the backend's unchanged.
      model_input_names: The class's default of this option.
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
    options = check_options(settings, kind)
    try:
        backend = kind.build(folder, options)
        add_tokens(backend, settings, [options[role] for role in kind.named])
        _set_template(backend, kind.template(options), folder)
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"{folder}: its vocabulary cannot be read: {error}") from None
    return Subwords(backend, special, settings_with_defaults(settings, kind, options))


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


def check_options(settings: TokenizerSettings, kind: Schema) -> dict[str, Any]:
    """Checks tokenizer_config.json against the schema of a kind of vocabulary.

    Args:
      settings: The settings files.
      kind: The schema.

    Returns:
      The options of `kind.defaults`, and the contents of the named tokens.

    Raises:
      ValueError: If an option would change ids in a way that is not implemented.
    """
    config = read_optional(settings.folder / "config.json")
    named_class = settings.options.get("tokenizer_class") or config.get("tokenizer_class")
    if named_class is not None and str(named_class).removesuffix("Fast") not in kind.classes:
        accepted = ", ".join(kind.classes)
        raise ValueError(
            f"{settings.folder}: tokenizer_class is {named_class!r}; this vocabulary is read as "
            f"that of {accepted}; {CONVERT}"
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
    """Adds the tokens of the files to a backend, in the order of their ids.

    Args:
      backend: The tokenizer, to which tokens are added in place.
      settings: The settings files.
      own: The special tokens of its class. Those that the vocabulary lacks are not added.

    Raises:
      ValueError: If a token would get another id than its file specifies.
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
                f"{settings.folder / name}: the added token {token.content!r} has the id {number}; "
                f"with this vocabulary its id would be {place}"
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
    build=lambda folder, options: of_t5(folder / "spiece.model", options["extra_ids"]),
    demanded={"add_prefix_space": True, "sp_model_kwargs": {}},
    named=_SENTENCEPIECE,
    defaults={"extra_ids": 100},
    fixed=("eos_token", "unk_token"),
)
_MARIAN = Schema(
    classes=("MarianTokenizer",),
    build=lambda folder, _: of_marian(folder / "source.spm", read_json(folder / "vocab.json")),
    demanded={"separate_vocabs": False, "sp_model_kwargs": {}},
    named=_SENTENCEPIECE,
    fixed=("eos_token", "unk_token"),
)
