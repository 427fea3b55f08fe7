"""The parts of a tokenizer.json: its steps, its special tokens and its settings."""

import json
from typing import Any

import tokenizers

_OF_BPE = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


def list_steps(parts: dict, name: str) -> list[dict]:
    """Returns the steps of a tokenizer's part, in the order of execution.

    Args:
        parts: The parsed tokenizer.json.
        name: "normalizer", "pre_tokenizer" or "decoder".
    """
    # A part of the type "Sequence" lists its steps under this key.
    key = f"{name.replace('_', '')}s"

    def steps(part: dict | None) -> list[dict]:
        if part is None or part["type"] != "Sequence":
            return [part] if part else []
        return [step for inner in part[key] for step in steps(inner)]

    return steps(parts[name])


def special_texts(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Returns the text of each special token by its id."""
    added = backend.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def tokenizer_parts(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Returns the backend's tokenizer.json as a dict, without vocabulary and merges.

    Serializing and parsing 500,000 merges would take longer than reading the file.
    """
    small = tokenizers.Tokenizer(tokenizers.models.BPE())
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(small, name, part)
    if backend.truncation is not None:
        small.enable_truncation(**backend.truncation)
    if backend.padding is not None:
        small.enable_padding(**backend.padding)
    added = sorted(backend.get_added_tokens_decoder().items())
    entries = [{"id": number} | token.__getstate__() for number, token in added]
    if isinstance(backend.model, tokenizers.models.BPE):
        model = {"type": "BPE"} | {name: getattr(backend.model, name) for name in _OF_BPE}
    else:  # The model is WordPiece, WordLevel or Unigram.
        model = json.loads(backend.model.__getstate__())
        del model["vocab"]
    return json.loads(small.to_str()) | {"added_tokens": entries, "model": model}
