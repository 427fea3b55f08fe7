"""Reads the settings files of a tokenizer, and compares them with tokenizer.json.

The settings files are tokenizer_config.json, special_tokens_map.json and added_tokens.json.

Reference: `PreTrainedTokenizerBase._from_pretrained` of transformers 5.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from jaxformer.artifacts.files import read_optional
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer_files import ADDED, CONFIG, MAP
from jaxformer.artifacts.tokenizer_parts import list_steps

LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenizerSettings(NamedTuple):
    """Contents of the settings files of a tokenizer.

    Attributes:
        folder: The folder of the files.
        options: The content of tokenizer_config.json, with the entries of special_tokens_map.json.
        named: The special tokens by role, such as "eos_token".
        added: Tokens that are added to the vocabulary, by id.
        extra: Additional special tokens, without ids.
    """

    folder: Path
    options: dict[str, Any]
    named: dict[str, AddedToken]
    added: dict[int, AddedToken]
    extra: tuple[AddedToken, ...]


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads the settings files of a tokenizer; a missing file counts as empty.

    As in transformers, special_tokens_map.json and added_tokens.json are used only if
    tokenizer_config.json has no `added_tokens_decoder`.

    Raises:
        ValueError: An option or a token in a file is malformed. The message gives the file and
            the key.
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
    extra = {token.content: token for key in LISTS for token in _tokens(options, key, path)}
    if modern:
        added = _decoder(options["added_tokens_decoder"], path)
    else:
        special = {token.content for token in named.values()} | extra.keys()
        added = _added(folder / ADDED, special)
    return TokenizerSettings(folder, options, named, added, tuple(extra.values()))


def _tokens(options: dict[str, Any], key: str, path: Path) -> Iterable[AddedToken]:
    value = options.get(key) or []
    entries = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | dict):
        raise ValueError(f"{path}: {key} is {value!r}; it must be a list of tokens")
    return [_token(entry, path, key) for entry in entries]


def _token(value: Any, path: Path, key: str) -> AddedToken:
    """Returns a special token; `value` is its text, or an object with its text and flags."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True, normalized=False)
    return _added_token(value, path, key, {"special": True})


def _added_token(value: Any, path: Path, key: str, more: dict[str, bool]) -> AddedToken:
    is_token = isinstance(value, dict) and isinstance(value.get("content"), str)
    flags = {x: value[x] for x in FLAGS if x in value} if is_token else {}
    if not is_token or not value["content"] or any(type(x) is not bool for x in flags.values()):
        raise ValueError(
            f"{path}: {key} is {value!r}; it must be the text of a token, or an object with "
            f"'content' and the flags {', '.join(FLAGS)}, each true or false"
        )
    return AddedToken(value["content"], **flags | more)


def _decoder(value: Any, path: Path) -> dict[int, AddedToken]:
    if not isinstance(value, dict) or not all(x.isascii() and x.isdigit() for x in value):
        raise ValueError(
            f"{path}: added_tokens_decoder must be a JSON object whose keys are token ids"
        )
    return {
        int(key): _added_token(entry, path, f"added_tokens_decoder[{key!r}]", {})
        for key, entry in value.items()
    }


def _added(path: Path, special: Iterable[str]) -> dict[int, AddedToken]:
    added = {}
    for text, number in read_optional(path).items():
        if type(number) is not int or number < 0 or not text or number in added:
            raise ValueError(
                f"{path}: {text!r} is {number!r}; it must be a token id that no other token has"
            )
        is_special = text in special
        added[number] = AddedToken(text, normalized=not is_special, special=is_special)
    return added


# ---- contradictions


def contradictions(tokenizer: Subwords, settings: TokenizerSettings) -> Iterator[str]:
    """Yields a message for each contradiction between tokenizer.json and the settings files.

    Args:
        tokenizer: The tokenizer that was read from tokenizer.json.
        settings: The settings files.
    """
    for key, ours in _settings(tokenizer.parts).items():
        theirs = settings.options.get(key)
        if type(theirs) is bool and theirs != ours:
            yield f"{CONFIG} has {key} {theirs}, but tokenizer.json has {ours}"
    yield from _added_tokens(tokenizer, settings)
    yield from _named_tokens(tokenizer, settings)


def _settings(content: dict[str, Any]) -> dict[str, bool]:
    """Returns the options of tokenizer_config.json that have the same effect as tokenizer.json."""
    steps = list_steps(content, "normalizer")
    kinds = {step.get("type"): step for step in reversed(steps)}
    options = {"do_lower_case": "Lowercase" in kinds, "strip_accents": "StripAccents" in kinds}
    if (bert := kinds.get("BertNormalizer")) is not None:
        lower, accents = bool(bert.get("lowercase")), bert.get("strip_accents")
        options["do_lower_case"] |= lower
        options["strip_accents"] = lower if accents is None else bool(accents)
        options["tokenize_chinese_chars"] = bool(bert.get("handle_chinese_chars"))
    for step in list_steps(content, "pre_tokenizer"):
        prefix = step.get("add_prefix_space")
        if step.get("type") == "ByteLevel":
            options["add_prefix_space"] = bool(prefix) or options.get("add_prefix_space", False)
        elif step.get("type") == "Metaspace":
            is_prepended = step.get("prepend_scheme", "always") != "never"
            options["add_prefix_space"] = is_prepended and prefix is not False
    return options


def _added_tokens(tokenizer: Subwords, settings: TokenizerSettings) -> Iterator[str]:
    entries = {x["content"]: x for x in tokenizer.parts["added_tokens"]}
    for number, token in sorted(settings.added.items()):
        place, entry = tokenizer.token_to_id(token.content), entries.get(token.content)
        name = f"the added token {token.content!r}"
        if place != number:
            where = "has no such token" if place is None else f"has this token with the id {place}"
            yield f"{name} has the id {number} in the settings files, but tokenizer.json {where}"
        elif entry is None:
            yield f"{CONFIG} contains {name}, but in tokenizer.json it is not an added token"
        else:
            for flag in ("special",) if entry["special"] else FLAGS:
                theirs, ours = getattr(token, flag), entry[flag]
                if theirs != ours:
                    has = f"{flag} is {theirs} in the settings files"
                    yield f"{name}: {has}, but {ours} in tokenizer.json"


def _named_tokens(tokenizer: Subwords, settings: TokenizerSettings) -> Iterator[str]:
    """Yields messages if the files disagree about the tokens that begin or end a text.

    The function compares the settings files with the special ids in config.json, and with the
    tokens that the template in tokenizer.json adds.
    """
    begin = () if tokenizer.special.begin is None else (tokenizer.special.begin,)
    expected = {"eos_token": tokenizer.special.stop_tokens, "bos_token": begin}
    for role, ids in expected.items():
        if (token := settings.named.get(role)) is None:
            continue
        place = tokenizer.token_to_id(token.content)
        if place is None:
            yield f"{CONFIG} has {role} {token.content!r}, but tokenizer.json has no such token"
        elif ids and place not in ids:
            other = " and ".join(map(str, ids))
            yield f"{CONFIG} has {role} {token.content!r} (id {place}), but {role}_id is {other}"
    template = {"bos_token": tokenizer.before, "eos_token": tokenizer.after}
    for role, ids in template.items():
        token, value = settings.named.get(role), settings.options.get(f"add_{role}")
        if type(value) is bool and token is not None:
            has = tokenizer.token_to_id(token.content) in ids
            if has != value:
                does = "adds" if has else "does not add"
                yield f"{CONFIG} has add_{role} {value}, but tokenizer.json {does} this token"
