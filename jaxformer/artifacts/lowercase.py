"""Tokenizers that take every text in lower case."""

import json

import tokenizers
from tokenizers import normalizers

from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer


def lowercased(tokenizer: Tokenizer | Subwords) -> Tokenizer | Subwords:
    """The same tokenizer, of each text in lower case; its file says so, and goes where it goes."""
    if lowers_case(tokenizer):
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    if isinstance(tokenizer, Subwords):
        return Subwords(backend, tokenizer.special)
    return Tokenizer(backend)


def lowers_case(tokenizer: Tokenizer | Subwords) -> bool:
    """Whether it takes every text in lower case."""
    return _lowers(json.loads(tokenizer.to_json())["normalizer"])


def _lowers(normalizer: dict | None) -> bool:
    """Of one part of a tokenizer.json, or of any in it."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(map(_lowers, normalizer["normalizers"]))
    return normalizer["type"] == "Lowercase" or normalizer.get("lowercase", False)
