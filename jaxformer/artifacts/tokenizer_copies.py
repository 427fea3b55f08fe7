"""Copies of a tokenizer with other settings, and the binding of a tokenizer to a model."""

from copy import copy
from typing import TypeVar

import tokenizers
from tokenizers import normalizers

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_files import TEMPLATE
from jaxformer.artifacts.tokenizer_parts import list_steps

AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer)


def bind(tokenizer: AnyTokenizer, vocab_size: int) -> AnyTokenizer:
    """Sets the `id_limit` of a tokenizer to a model's number of ids, and returns the tokenizer.

    Args:
        tokenizer: The tokenizer, which is modified. If the model lacks the id of the mask token,
            `tokenizer.mask_token` becomes None.
        vocab_size: The model's number of ids.

    Raises:
        ValueError: The model lacks a special id that every text needs.
    """
    tokenizer.id_limit = vocab_size
    if tokenizer.mask_token is not None and tokenizer.mask_token >= vocab_size:
        tokenizer.mask_token = None
    for token in tokenizer.special_ids:
        tokenizer.check_ids([[token]], vocab_size, "tokenizer: its special")
    return tokenizer


def parsing_special(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that encodes a special token in a text as the token's id."""
    parsing = copy(tokenizer)
    parsing.parses_special = True
    return parsing


def with_chat_template(tokenizer: AnyTokenizer, source: str) -> AnyTokenizer:
    """Returns a copy of the tokenizer whose default chat template is `source`."""
    changed = copy(tokenizer)
    for derived in ("chat_templates", "turn_end_tokens"):
        changed.__dict__.pop(derived, None)
    changed.settings_files = {**tokenizer.settings_files, TEMPLATE: source}
    return changed


def opening_texts(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that begins every text with `opening`, as in training."""
    opening = copy(tokenizer)
    opening.opens_texts = True
    return opening


def lowercased(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Returns a copy of the tokenizer that lowercases every text first.

    The copy's tokenizer.json contains a Lowercase step. If the tokenizer already lowercases, it is
    returned unchanged.
    """
    if lowers_case(tokenizer):
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    steps = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    lower = tokenizer.with_backend(backend)
    lower.parses_special = tokenizer.parses_special
    lower.opens_texts = tokenizer.opens_texts
    return lower if tokenizer.id_limit is None else bind(lower, tokenizer.id_limit)


def lowers_case(tokenizer: Tokenizer) -> bool:
    """Returns whether the tokenizer lowercases every text."""
    steps = list_steps(tokenizer.parts, "normalizer")
    return any(step["type"] == "Lowercase" or step.get("lowercase", False) for step in steps)
