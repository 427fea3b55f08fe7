"""Settings files of a vocabulary.

They are tokenizer_config.json, special_tokens_map.json and added_tokens.json.

A `tokenizer.json` holds everything that decides the ids of a text. An older vocabulary (vocab.txt,
merges.txt, spiece.model, source.spm) does not, so these files are read through a closed schema:
each option is implemented, known not to change ids, or refused by name.

Reference: `PreTrainedTokenizerBase._from_pretrained` of transformers 5.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from jaxformer.artifacts.files import read_optional
from jaxformer.artifacts.tokenizer_files import ADDED, CONFIG, MAP

SETTINGS_FILES = (CONFIG, MAP, ADDED)

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
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_OWN = frozenset({"tokenizer_class", "added_tokens_decoder", *_LISTS})
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class Schema:
    """Options that the tokenizer classes of one kind of vocabulary accept.

    Attributes:
      classes: Names of the tokenizer classes that give the same ids.
      build: Returns the backend of a folder from the checked options.
      demanded: Options of which only one value is implemented, with that value.
      named: Roles of the class's special tokens, with the default tokens.
      flags: Options that are true, false or null, with their defaults.
      numbers: Options that are whole numbers, with their defaults.
      fixed: Roles whose token cannot be changed.
      template: Returns the template of a text (`$A`) from the checked options; an empty list leaves
        the backend's unchanged.
      model_input_names: The class's default of this option.
    """

    classes: tuple[str, ...]
    build: Callable[[Path, dict[str, Any]], tokenizers.Tokenizer]
    demanded: dict[str, Any]
    named: dict[str, str]
    flags: dict[str, bool | None] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    template: Callable[[dict[str, Any]], list[str]] = lambda options: []
    model_input_names: tuple[str, ...] = ("input_ids", "attention_mask")


class TokenizerSettings(NamedTuple):
    """Contents of the settings files of a vocabulary.

    Attributes:
      folder: The folder that they are in.
      options: tokenizer_config.json, with the entries of special_tokens_map.json.
      named: The special tokens by their role, such as "eos_token".
      added: Tokens that are added to the vocabulary, by id.
      extra: Further special tokens, without ids.
    """

    folder: Path
    options: dict[str, Any]
    named: dict[str, AddedToken]
    added: dict[int, AddedToken]
    extra: tuple[AddedToken, ...]

    def error(self, key: str, accepted: str) -> ValueError:
        """Returns the error for an option's value."""
        return ValueError(f"{self.folder / CONFIG}: {key} is {self.options.get(key)!r}; {accepted}")


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads the settings files of a vocabulary. A missing file counts as empty.

    As in transformers, special_tokens_map.json and added_tokens.json are used only if
    tokenizer_config.json has no `added_tokens_decoder`.

    Raises:
      ValueError: If an entry is malformed; the message names the file and the key.
    """
    path = folder / CONFIG
    options = read_optional(path)
    modern = options.get("added_tokens_decoder") is not None
    options |= {} if modern else read_optional(folder / MAP)
    named = {
        key: _token(value, path, key)
        for key, value in options.items()
        if key.endswith("_token") and not isinstance(value, bool | None)
    }
    extra = {token.content: token for key in _LISTS for token in _tokens(options, key, path)}
    if modern:
        added = _decoder(options["added_tokens_decoder"], path)
    else:
        special = {token.content for token in named.values()} | extra.keys()
        added = _added(folder / ADDED, special)
    return TokenizerSettings(folder, options, named, added, tuple(extra.values()))


def check_options(settings: TokenizerSettings, kind: Schema, named_class: Any) -> dict[str, Any]:
    """Checks tokenizer_config.json against the schema of a kind of vocabulary.

    Args:
      settings: The settings files.
      kind: The schema.
      named_class: The tokenizer class that the folder names, or None.

    Returns:
      The flags, the numbers, and the contents of the named tokens.

    Raises:
      ValueError: If an option would change ids in a way that is not implemented.
    """
    if named_class is not None and str(named_class).removesuffix("Fast") not in kind.classes:
        accepted = ", ".join(kind.classes)
        raise ValueError(
            f"{settings.folder}: tokenizer_class is {named_class!r}; this vocabulary is read as "
            f"that of {accepted}; {CONVERT}"
        )
    checked: dict[str, Any] = kind.flags | kind.numbers
    for key, value in settings.options.items():
        if value is None:
            continue
        if key in kind.flags and type(value) is not bool:
            raise settings.error(key, "it must be true, false or null")
        if key in kind.numbers and (type(value) is not int or not 0 <= value <= 1000):
            raise settings.error(key, "it must be a whole number in 0 … 1000")
        if key in checked:
            checked[key] = value
        elif key in kind.demanded:
            if value != kind.demanded[key]:
                raise settings.error(key, f"only {kind.demanded[key]!r} is implemented; {CONVERT}")
        elif not _is_known(key, value):
            raise settings.error(key, f"this option is unknown, and might change ids; {CONVERT}")
    names = kind.named | {k: x.content for k, x in settings.named.items() if k in kind.named}
    for key in kind.fixed:
        if names[key] != kind.named[key]:
            raise settings.error(key, f"only {kind.named[key]!r} is implemented; {CONVERT}")
    return checked | names


def _is_known(key: str, value: Any) -> bool:
    is_handled = key in _OWN or key.endswith("_token")
    return is_handled or key in HARMLESS_SETTINGS or value in (False, [], {})


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


def _tokens(options: dict[str, Any], key: str, path: Path) -> Iterable[AddedToken]:
    value = options.get(key) or []
    entries = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | dict):
        raise ValueError(f"{path}: {key} is {value!r}; it must be a list of tokens")
    return [_token(entry, path, key) for entry in entries]


def _token(value: Any, path: Path, key: str) -> AddedToken:
    """Returns a special token from its text, or from an object with its text and flags."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    return _added_token(value, path, key, {"special": True})


def _added_token(value: Any, path: Path, key: str, more: dict[str, bool]) -> AddedToken:
    is_token = isinstance(value, dict) and isinstance(value.get("content"), str)
    flags = {x: value[x] for x in FLAGS if x in value} if is_token else {}
    if not is_token or not value["content"] or any(type(x) is not bool for x in flags.values()):
        raise ValueError(
            f"{path}: {key} is {value!r}; it must be a token: its text, or an object with "
            f"'content' and {', '.join(FLAGS)}, each true or false"
        )
    return AddedToken(value["content"], **flags | more)


def _decoder(value: Any, path: Path) -> dict[int, AddedToken]:
    if not isinstance(value, dict) or not all(x.isascii() and x.isdigit() for x in value):
        raise ValueError(f"{path}: added_tokens_decoder must be an object with ids as its keys")
    return {
        int(key): _added_token(entry, path, f"added_tokens_decoder[{key!r}]", {})
        for key, entry in value.items()
    }


def _added(path: Path, special: Iterable[str]) -> dict[int, AddedToken]:
    added = {}
    for text, number in read_optional(path).items():
        if type(number) is not int or number < 0 or not text or number in added:
            raise ValueError(
                f"{path}: {text!r} is {number!r}; it must be an id that no other token has"
            )
        is_special = text in special
        added[number] = AddedToken(text, normalized=not is_special, special=is_special)
    return added
