"""Reader and writer of the tokenizer in a folder of Hugging Face's format.

This covers the special ids in config.json and generation_config.json, too. tokenizer.json alone
decides the ids of a text. transformers rebuilds some tokenizers from the settings files, so the
reader warns if these contradict tokenizer.json: the ids of transformers then differ from ours.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxformer.artifacts.files import read_json, read_optional, write_json
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.hub.tokenizers.older_vocabularies import read_older
from jaxformer.hub.tokenizers.settings import CONFIG, FLAGS, TokenizerSettings, read_settings

_SPECIAL = {"begin": "bos_token_id", "start": "decoder_start_token_id", "pad": "pad_token_id"}


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
    special = special_tokens(folder, vocab_size)
    path = folder / "tokenizer.json"
    if not path.is_file():
        backend = read_older(folder)
        return None if backend is None else Subwords(backend, special)
    tokenizer, settings = Subwords.load(path, special), read_settings(folder)
    for problem in contradictions(read_json(path), tokenizer, settings):
        warnings.warn(f"{folder}: {problem}; tokenizer.json is used", stacklevel=2)
    return tokenizer


def special_tokens(folder: Path, vocab_size: int | None = None) -> SpecialTokens:
    """Reads the special ids of config.json; those of generation_config.json take precedence.

    null and -1 both mean that there is no such token.

    Raises:
      ValueError: If an entry is not an id. The message names the file and the key.
    """
    ids: dict[str, list[int]] = {}
    for path in (folder / name for name in ("config.json", "generation_config.json")):
        content = read_optional(path)
        for key in ("eos_token_id", *_SPECIAL.values()):
            if key in content:
                ids[key] = _ids(path, key, content[key], vocab_size)
    others = {ours: next(iter(ids.get(x, ())), None) for ours, x in _SPECIAL.items()}
    return SpecialTokens(tuple(ids.get("eos_token_id", ())), **others)


def _ids(path: Path, key: str, value: Any, vocab_size: int | None) -> list[int]:
    """Returns the checked id, or for eos_token_id the list of ids, of one key."""
    if value is None or (type(value) is int and value == -1):
        return []
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < (vocab_size or 2**31):
            most = "" if vocab_size is None else f" below vocab_size ({vocab_size})"
            lists = ", a list of ids" if key == "eos_token_id" else ""
            raise ValueError(
                f"{path}: {key} is {value!r}; it must be a token id{most}{lists} or null"
            )
    return ids


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, config) -> dict:
    """Writes the tokenizer's files and returns the special ids for config.json."""
    special = _special_of(tokenizer, config)
    settings = {theirs: getattr(special, ours) for ours, theirs in _SPECIAL.items()}
    ends = list(special.stop_tokens)
    settings["eos_token_id"] = None if not ends else ends[0] if len(ends) == 1 else ends
    if tokenizer is None:
        return settings
    tokenizer.save(folder / "tokenizer.json")
    content = json.loads((folder / "tokenizer.json").read_text())
    words = {x["id"]: x["content"] for x in content["added_tokens"]}
    if tokenizer.special is None:  # our own: the end of a document also begins the next one
        (end,), name = special.stop_tokens, words[special.stop_tokens[0]]
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(f"{name} $A", None, [(name, end)])
        backend.save(str(folder / "tokenizer.json"))
    roles = {x: settings[f"{x}_id"] for x in ("eos_token", "bos_token", "pad_token")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_length}
    about["clean_up_tokenization_spaces"] = False
    about |= {x: words[n] for x, n in roles.items() if isinstance(n, int) and n in words}
    write_json(folder / CONFIG, about)
    return settings


def _special_of(tokenizer: Tokenizer | None, config) -> SpecialTokens:
    """Returns the special ids of the tokenizer.

    For our own tokenizer or None, they are derived from the class of the config.
    """
    if tokenizer is not None and tokenizer.special is not None:
        return tokenizer.special
    end = None if tokenizer is None else tokenizer.end_of_text
    reads = config.reads_source and config.heads
    start = (end or 0) if reads else None
    has_pad = reads or config.bidirectional
    pad = max(getattr(config, "position_offset", 0) - 1, 0) if has_pad else None
    return SpecialTokens(() if end is None else (end,), end, start, pad)


def contradictions(
    content: dict[str, Any], tokenizer: Subwords, settings: TokenizerSettings
) -> Iterator[str]:
    """Yields a sentence for each contradiction.

    Args:
      content: The content of tokenizer.json.
      tokenizer: The tokenizer that was read from it.
      settings: The settings files.
    """
    for key, ours in _settings(content).items():
        theirs = settings.options.get(key)
        if type(theirs) is bool and theirs != ours:
            yield f"{CONFIG} has {key} {theirs}, but tokenizer.json has {ours}"
    yield from _added_tokens(content, tokenizer, settings)
    yield from _named_tokens(tokenizer, settings)


def _settings(content: dict[str, Any]) -> dict[str, bool]:
    """Returns the options of tokenizer_config.json that tokenizer.json decides, with its values."""
    steps = list(_parts(content.get("normalizer"), "normalizers"))
    kinds = {step.get("type"): step for step in reversed(steps)}
    options = {"do_lower_case": "Lowercase" in kinds, "strip_accents": "StripAccents" in kinds}
    if (bert := kinds.get("BertNormalizer")) is not None:
        lower, accents = bool(bert.get("lowercase")), bert.get("strip_accents")
        options["do_lower_case"] |= lower
        options["strip_accents"] = lower if accents is None else bool(accents)
        options["tokenize_chinese_chars"] = bool(bert.get("handle_chinese_chars"))
    for step in _parts(content.get("pre_tokenizer"), "pretokenizers"):
        prefix = step.get("add_prefix_space")
        if step.get("type") == "ByteLevel":
            options["add_prefix_space"] = bool(prefix) or options.get("add_prefix_space", False)
        elif step.get("type") == "Metaspace":
            is_prepended = step.get("prepend_scheme", "always") != "never"
            options["add_prefix_space"] = is_prepended and prefix is not False
    return options


def _parts(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yields the steps of a part of tokenizer.json in the order in which they run."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for inner in part.get(name, []):
            yield from _parts(inner, name)
    elif isinstance(part, dict):
        yield part


def _added_tokens(
    content: dict[str, Any], tokenizer: Subwords, settings: TokenizerSettings
) -> Iterator[str]:
    entries = {x["content"]: x for x in content.get("added_tokens", [])}
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
