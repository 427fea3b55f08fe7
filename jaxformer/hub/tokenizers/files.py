"""Reader and writer of the tokenizer in a folder of Hugging Face's format.

This covers the special ids in config.json and generation_config.json, too. tokenizer.json alone
decides the ids of a text. transformers rebuilds some tokenizers from the settings files, so the
reader warns if these contradict tokenizer.json: the ids of transformers then differ from ours.
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
        return read_older(folder, special)
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


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, config: TransformerConfig) -> dict:
    """Writes the tokenizer's files and returns the special ids for config.json.

    A tokenizer that came from a folder of transformers gets the settings files of that folder.
    """
    special = _special_of(tokenizer, config)
    ids: dict[str, Any] = {theirs: getattr(special, ours) for ours, theirs in SPECIAL.items()}
    ends = list(special.stop_tokens)
    ids["eos_token_id"] = None if not ends else ends[0] if len(ends) == 1 else ends
    if tokenizer is None:
        return ids
    tokenizer.save(folder / "tokenizer.json")
    if tokenizer.special is None:  # our own: the end of a document also begins the next one
        _add_opening(folder / "tokenizer.json", special.stop_tokens[0])
    if (folder / CONFIG).is_file():
        content = parse_json((folder / CONFIG).read_text())
        if "auto_map" in content:  # the code that it names is not in this folder
            del content["auto_map"]
            write_json(folder / CONFIG, content | {"tokenizer_class": GENERIC_CLASS})
    else:
        write_json(folder / CONFIG, _own_settings(tokenizer, ids, config))
    return ids


def _add_opening(path: Path, token: int) -> None:
    """Adds a template to a tokenizer.json that puts a token before each text."""
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
        ids: The special ids of config.json.
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


def _special_of(tokenizer: Tokenizer | None, config: TransformerConfig) -> SpecialTokens:
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
