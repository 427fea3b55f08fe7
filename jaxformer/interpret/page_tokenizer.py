"""Data with which a page encodes a text that the reader types (`page/tokenizer.js`)."""

import json
from typing import Any

import numpy as np

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.interpret.encoded_text import MOST_TOKENS, text_frame
from jaxformer.interpret.page_file import pack, pack_texts
from jaxformer.interpret.page_patterns import Unsupported
from jaxformer.interpret.page_text_steps import (
    RUST_WORD,
    decoder_steps,
    normalizer_steps,
    pre_tokenizer_steps,
)
from jaxformer.models.config.encoder import ReadsSource
from jaxformer.models.config.model import ModelConfig

_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_MODEL_FIELDS = """fuse_unk byte_fallback ignore_merges continuing_subword_prefix
    end_of_word_suffix max_input_chars_per_word""".split()


def tokenizer_reason(tokenizer: Tokenizer | None) -> str | None:
    """Returns the reason why a page cannot encode texts with a tokenizer; None if it can."""
    if tokenizer is None:
        return "the page was written from token ids, without a tokenizer"
    if type(tokenizer) not in (ByteTokenizer, Subwords):
        return f"the page does not implement tokenizers of the class {type(tokenizer).__name__}"
    model = tokenizer.parts["model"]
    if model["type"] not in _MODELS:
        return f"the page does not implement the tokenizer model {model['type']}"
    if model.get("dropout"):
        return "the tokenizer merges at random (dropout), so its tokens are not reproducible"
    try:
        _steps(tokenizer)
    except Unsupported as error:
        return str(error)
    return None


def tokenizer_data(tokenizer: Tokenizer | None, config: ModelConfig) -> dict[str, Any]:
    """Returns {"tokenizer": …} for a page's data, or {"tokenizer_reason": why it is missing}.

    Args:
        tokenizer: The tokenizer of the model.
        config: The config of the model, which limits the length of a text.
    """
    reason = tokenizer_reason(tokenizer)
    if tokenizer is None or reason is not None:
        return {"tokenizer_reason": reason}
    try:
        before, after = text_frame(config, tokenizer)
    except ValueError as error:
        return {"tokenizer_reason": str(error).removeprefix("tokenizer: ")}
    texts = {"text": _text_limits(before, after, config.max_length, config.vocab_size)}
    if isinstance(config, ReadsSource):
        around = list(tokenizer.before), list(tokenizer.after)
        texts["source"] = _text_limits(*around, config.longest_source, config.num_source_ids)
    return {"tokenizer": page_tokenizer(tokenizer) | texts}


def _text_limits(
    before: list[int], after: list[int], max_length: int, num_ids: int
) -> dict[str, Any]:
    """Returns the ids before and after a text, the token limit, and the number of token ids.

    Args:
        before: The ids before the text.
        after: The ids after the text.
        max_length: The maximum number of tokens that the model reads.
        num_ids: The number of token ids of the model.
    """
    most = min(max_length, MOST_TOKENS)
    limits = {"most_tokens": most, "limited_by_page": most < max_length, "num_ids": num_ids}
    return {"before": before, "after": after} | limits


def page_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the tokenizer as JSON. `tokenizer_reason` must have returned None.

    The result contains "normalizer", "pre_tokenizer" and "decoder" (lists of steps), "model"
    (vocabulary, merges or scores, and settings), "added" (added tokens), and the rules by which
    jaxformer encodes special tokens that a text spells out.
    """
    backend = tokenizer._backend
    return _steps(tokenizer) | {
        "model": _model(json.loads(backend.to_str())["model"]),
        "added": _added(tokenizer),
        "word": RUST_WORD,
        "parses_special": tokenizer.parses_special,
        "spellings": getattr(tokenizer, "_spellings", None),
        "special": sorted(getattr(tokenizer, "_special", ())),
    }


def _steps(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the steps before and after the tokenizer's model."""
    decoder = decoder_steps(tokenizer.parts)
    if isinstance(tokenizer, ByteTokenizer):
        # A `ByteTokenizer` decodes an added token to its text. The `tokenizers` library would
        # interpret each character of the text as a byte.
        decoder = [{**step, "added_as_text": True} for step in decoder]
    return {
        "normalizer": normalizer_steps(tokenizer.parts),
        "pre_tokenizer": pre_tokenizer_steps(tokenizer.parts),
        "decoder": decoder,
    }


def _model(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model of a tokenizer.json with packed tokens, merges and scores."""
    found: dict[str, Any] = {name: model[name] for name in _MODEL_FIELDS if name in model}
    found["type"] = model["type"]
    if model["type"] == "Unigram":
        tokens = [token for token, _ in model["vocab"]]
        scores = np.array([score for _, score in model["vocab"]], "<f8")
        # Scores are compared exactly, so all 64 bits are packed.
        found |= {"scores": pack(scores.view("<i4"), "int32"), "unk_id": model["unk_id"]}
        return found | {"vocabulary": pack_texts(tokens)}
    ids: dict[str, int] = model["vocab"]
    # The token of an unused id is empty.
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, number in ids.items():
        tokens[number] = token
    found |= {"vocabulary": pack_texts(tokens), "unk_id": ids.get(model.get("unk_token") or "")}
    if model["type"] == "BPE":
        pairs = [(ids[left], ids[right]) for left, right in model["merges"]]
        # All left ids come first, because similar numbers compress better.
        found["merges"] = pack(np.array(pairs, np.int32).reshape(-1, 2).T, "int32")
    return found


def _added(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the added tokens.

    The entry "sought" is the spelling that the page looks for in a (normalized) text. The entry
    "text" is the text to which the token is decoded.
    """
    normalizer, found = tokenizer._backend.normalizer, []
    options = ("id", "special", "single_word", "lstrip", "rstrip", "normalized")
    for token in tokenizer.parts["added_tokens"]:
        text = sought = token["content"]
        if token["normalized"] and normalizer is not None:
            sought = normalizer.normalize_str(text)
        if not isinstance(tokenizer, ByteTokenizer):
            text = tokenizer.token_name(token["id"])
        found.append({name: token[name] for name in options} | {"sought": sought, "text": text})
    return found
