"""Reader and writer of the tokenizer in a folder of Hugging Face's format.

The module also reads and writes the special ids in config.json and generation_config.json.
jaxformer encodes texts according to tokenizer.json alone. transformers rebuilds some tokenizers
from the settings files, so the reader warns if these files contradict tokenizer.json.
"""

import warnings
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxformer.artifacts.files import parse_json, read_optional, write_json
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_files import CONFIG, GENERIC_CLASS
from jaxformer.hub.tokenizers.older_vocabularies import read_older
from jaxformer.hub.tokenizers.settings import contradictions, read_settings
from jaxformer.models.config.transformer import TransformerConfig

SPECIAL = {"begin": "bos_token_id", "start": "decoder_start_token_id", "pad": "pad_token_id"}


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> Subwords | None:
    """Reads the tokenizer of a folder in Hugging Face's format.

    Args:
        folder: A folder with tokenizer.json or older vocabulary files, and small JSON files with
            settings.
        vocab_size: The model's vocabulary size. Special ids outside the vocabulary are dropped. If
            None, all ids are returned.

    Returns:
        The tokenizer, or None if the folder contains no tokenizer.

    Raises:
        ValueError: A file is damaged or sets an option that is not implemented, or a special
            id is not a nonnegative integer.
    """
    special = read_special_tokens(folder, vocab_size)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return read_older(folder, special)
    tokenizer, settings = Subwords.load(path, special), read_settings(folder)
    for problem in contradictions(tokenizer, settings):
        warnings.warn(f"{folder}: {problem}; tokenizer.json is used", stacklevel=2)
    return tokenizer


def read_special_tokens(folder: Path, vocab_size: int | None = None) -> SpecialTokens:
    """Reads the special ids of config.json and generation_config.json.

    An id in generation_config.json takes precedence over an id in config.json. The values null and
    -1 mean that the model does not have the token.

    Raises:
        ValueError: An option has an invalid value. The message gives the file and the option.
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
    """Returns the ids in the value of an option, such as eos_token_id, after checking them.

    Only eos_token_id may have several ids. Ids outside the vocabulary are dropped: the default ids
    of a class in transformers are often too large for a model with a small vocabulary.
    """
    if value is None or (type(value) is int and value == -1):
        return []
    ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            lists = ", a list of ids" if key == "eos_token_id" else ""
            raise ValueError(f"{path}: {key} is {value!r}; it must be a token id{lists} or null")
    return [token for token in ids if token < (vocab_size or 2**31)]


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, config: TransformerConfig) -> dict:
    """Writes the tokenizer's files and returns the special ids for config.json.

    If the tokenizer came from a folder of transformers, the settings files of that folder are
    written too.
    """
    special = _special_tokens(tokenizer, config)
    ids: dict[str, Any] = {theirs: getattr(special, ours) for ours, theirs in SPECIAL.items()}
    ends = list(special.stop_tokens)
    ids["eos_token_id"] = None if not ends else ends[0] if len(ends) == 1 else ends
    if tokenizer is None:
        return ids
    tokenizer.save(folder / "tokenizer.json")
    if tokenizer.special is None:
        # In jaxformer's own tokenizers, the token end_of_text also begins a document.
        _add_opening(folder / "tokenizer.json", special.stop_tokens[0])
    if (folder / CONFIG).is_file():
        content = parse_json((folder / CONFIG).read_text())
        # The option refers to code that the exported folder does not contain.
        if "auto_map" in content:
            del content["auto_map"]
            write_json(folder / CONFIG, content | {"tokenizer_class": GENERIC_CLASS})
    else:
        write_json(folder / CONFIG, _own_settings(tokenizer, ids, config))
    return ids


def _add_opening(path: Path, token: int) -> None:
    """Changes a tokenizer.json so that the tokenizer adds a token before each text."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    name = backend.id_to_token(token)
    backend.post_processor = processors.TemplateProcessing(f"{name} $A", None, [(name, token)])
    backend.save(str(path))


def _own_settings(
    tokenizer: Tokenizer, ids: dict[str, Any], config: TransformerConfig
) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json for a tokenizer without settings files.

    Args:
        tokenizer: The tokenizer.
        ids: The special ids for config.json.
        config: The model's config.
    """
    words = {entry["id"]: entry["content"] for entry in tokenizer.parts["added_tokens"]}
    roles = {role: ids[f"{role}_id"] for role in ("eos_token", "bos_token", "pad_token")}
    roles["mask_token"] = tokenizer.mask_token
    if config.bidirectional and tokenizer.before and tokenizer.after:
        roles |= {"cls_token": tokenizer.before[0], "sep_token": tokenizer.after[-1]}
    named = {role: words[n] for role, n in roles.items() if isinstance(n, int) and n in words}
    unknown = tokenizer.parts["model"].get("unk_token")
    return {
        "tokenizer_class": GENERIC_CLASS,
        "model_max_length": config.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **named,
        **({} if unknown is None else {"unk_token": unknown}),
    }


def _special_tokens(tokenizer: Tokenizer | None, config: TransformerConfig) -> SpecialTokens:
    """Returns the special ids of the tokenizer.

    For jaxformer's own tokenizers, or without a tokenizer, the config determines the start id and
    the padding id.
    """
    if tokenizer is not None and tokenizer.special is not None:
        return tokenizer.special
    end = None if tokenizer is None else tokenizer.end_of_text
    reads = config.reads_source and config.heads
    start = (end or 0) if reads else None
    has_pad = reads or config.bidirectional
    pad = max(getattr(config, "position_offset", 0) - 1, 0) if has_pad else None
    return SpecialTokens(() if end is None else (end,), end, start, pad)
