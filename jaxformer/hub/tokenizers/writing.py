"""Writer of the tokenizer into a folder of Hugging Face's format."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxformer.artifacts.files import parse_json, write_json
from jaxformer.artifacts.tokenizer import SpecialTokens, Tokenizer
from jaxformer.artifacts.tokenizer_files import CONFIG, GENERIC_CLASS
from jaxformer.hub.tokenizers.files import SPECIAL
from jaxformer.models.config.transformer import TransformerConfig


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
