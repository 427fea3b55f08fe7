"""Reader of the tokenizer in a folder of Hugging Face's format.

This covers the special ids in config.json and generation_config.json, too. tokenizer.json alone
decides the ids of a text. transformers rebuilds some tokenizers from the settings files, so the
reader warns if these contradict tokenizer.json: the ids of transformers then differ from ours.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.artifacts.files import read_optional
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens, steps_of
from jaxformer.artifacts.tokenizer_files import CONFIG
from jaxformer.hub.tokenizers.older_vocabularies import read_older
from jaxformer.hub.tokenizers.settings import FLAGS, TokenizerSettings, read_settings

SPECIAL = {"begin": "bos_token_id", "start": "decoder_start_token_id", "pad": "pad_token_id"}


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> Subwords | None:
    """Reads the tokenizer of a folder in Hugging Face's format.

    Args:
      folder: The folder. It holds tokenizer.json or older vocabulary files, and small JSON files
        with settings.
      vocab_size: Number of ids of the model; None: ids are not checked.

    Returns:
      The tokenizer, or None if the folder has none.

    Raises:
      ValueError: If a file is damaged or asks for an option that is not implemented, or if a
        special id is not an id of the model.
    """
    special = read_special_tokens(folder, vocab_size)
    path = folder / "tokenizer.json"
    if not path.is_file():
        older = read_older(folder)
        return None if older is None else Subwords(older.backend, special, older.settings_files)
    tokenizer, settings = Subwords.load(path, special), read_settings(folder)
    for problem in contradictions(tokenizer, settings):
        warnings.warn(f"{folder}: {problem}; tokenizer.json is used", stacklevel=2)
    return tokenizer


def read_special_tokens(folder: Path, vocab_size: int | None = None) -> SpecialTokens:
    """Reads the special ids of config.json; those of generation_config.json take precedence.

    null and -1 both mean that there is no such token.

    Raises:
      ValueError: If an entry is not an id. The message names the file and the key.
    """
    ids: dict[str, list[int]] = {}
    for path in (folder / name for name in ("config.json", "generation_config.json")):
        content = read_optional(path)
        for key in ("eos_token_id", *SPECIAL.values()):
            if key in content:
                ids[key] = _ids(path, key, content[key], vocab_size)
    others = {ours: next(iter(ids.get(x, ())), None) for ours, x in SPECIAL.items()}
    return SpecialTokens(tuple(ids.get("eos_token_id", ())), **others)


def _ids(path: Path, key: str, value: Any, vocab_size: int | None) -> list[int]:
    """Returns the checked id, or for eos_token_id the list of ids, of one key.

    Ids beyond the vocabulary are left out: a config with a small vocabulary often keeps the default
    ids of its class in transformers, which the model can neither read nor generate.
    """
    if value is None or (type(value) is int and value == -1):
        return []
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            lists = ", a list of ids" if key == "eos_token_id" else ""
            raise ValueError(f"{path}: {key} is {value!r}; it must be a token id{lists} or null")
    return [token for token in ids if token < (vocab_size or 2**31)]


def contradictions(tokenizer: Subwords, settings: TokenizerSettings) -> Iterator[str]:
    """Yields a sentence for each contradiction.

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
    """Returns the options of tokenizer_config.json that tokenizer.json decides, with its values."""
    steps = steps_of(content, "normalizer")
    kinds = {step.get("type"): step for step in reversed(steps)}
    options = {"do_lower_case": "Lowercase" in kinds, "strip_accents": "StripAccents" in kinds}
    if (bert := kinds.get("BertNormalizer")) is not None:
        lower, accents = bool(bert.get("lowercase")), bert.get("strip_accents")
        options["do_lower_case"] |= lower
        options["strip_accents"] = lower if accents is None else bool(accents)
        options["tokenize_chinese_chars"] = bool(bert.get("handle_chinese_chars"))
    for step in steps_of(content, "pre_tokenizer"):
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
            where = "has no such token" if place is None else f"has it at {place}"
            yield f"{name} has the id {number} in the settings files, but tokenizer.json {where}"
        elif entry is None:
            yield f"{name} is found in texts by {CONFIG}, but not by tokenizer.json"
        else:
            for flag in ("special",) if entry["special"] else FLAGS:
                theirs, ours = getattr(token, flag), entry[flag]
                if theirs != ours:
                    has = f"has {flag} {theirs} in the settings files"
                    yield f"{name} {has}, but tokenizer.json has {ours}"


def _named_tokens(tokenizer: Subwords, settings: TokenizerSettings) -> Iterator[str]:
    """Yields contradictions about the tokens that begin and end a text.

    The settings files must agree with the ids of config.json and with tokenizer.json's template.
    """
    begin = () if tokenizer.special.begin is None else (tokenizer.special.begin,)
    expected = {"eos_token": tokenizer.special.stop_tokens, "bos_token": begin}
    for role, ids in expected.items():
        if (token := settings.named.get(role)) is None:
            continue
        place = tokenizer.token_to_id(token.content)
        if place is None:
            yield f"{CONFIG} has {role} {token.content!r}, which tokenizer.json does not have"
        elif ids and place not in ids:
            other = " and ".join(map(str, ids))
            yield f"{CONFIG} has {role} {token.content!r} (id {place}), but {role}_id is {other}"
    template = {"bos_token": tokenizer.before, "eos_token": tokenizer.after}
    for role, ids in template.items():
        token, value = settings.named.get(role), settings.options.get(f"add_{role}")
        if type(value) is bool and token is not None:
            has = tokenizer.token_to_id(token.content) in ids
            if has != value:
                does = "adds it" if has else "does not add it"
                yield f"{CONFIG} has add_{role} {value}, but tokenizer.json {does}"
