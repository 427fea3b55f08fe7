"""Checks and encodes the text of a page, and makes readable labels for tokens."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.trees import Weights
from jaxformer.models.config.encoder import check_reads_text
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel
from jaxformer.terminal import kind_of

MOST_TOKENS = 512
# If `explain` is called without a target, the model's own translation has at most this many tokens.
MOST_TARGET_TOKENS = 48


class EncodedText(NamedTuple):
    """Token ids of a text and, for a model with a source, of the source.

    Attributes:
        tokens: The ids of the text or, for a model with a source, of the target.
        source: The ids of the source; None for a model without a source.
    """

    tokens: list[int]
    source: list[int] | None = None

    def as_batch(self) -> tuple[Int[np.ndarray, "1 length"], Int[np.ndarray, "1 source"] | None]:
        """Returns the tokens and the source as a batch of one text."""
        source = None if self.source is None else np.array([self.source], np.int32)
        return np.array([self.tokens], np.int32), source


def encode_text(
    model: LanguageModel,
    variables: Weights,
    text: str | Sequence[int],
    tokenizer: Tokenizer | None,
    target: str | Sequence[int] | None,
) -> EncodedText:
    """Checks and encodes the texts; see `explain` for the arguments.

    Raises:
        ValueError: A text is empty or too long, or a string is passed without a tokenizer.
    """
    config = model.config
    if not config.reads_source:
        if target is not None:
            raise ValueError(f"target must be None, because {kind_of(model)} has no source")

        def encode(tokenizer: Tokenizer, text: str) -> list[int]:
            before, after = text_frame(config, tokenizer)
            return [*before, *tokenizer.encode_many([text])[0], *after]

        tokens = _encoded("text", text, tokenizer, encode)
        _check("text", tokens, config.max_length, config.vocab_size)
        return EncodedText(tokens)
    check_reads_text(config)
    source = _encoded("text", text, tokenizer, lambda reader, text: reader.encode_source(text))
    _check("text", source, config.longest_source, config.num_source_ids)
    if target is None:
        tokens = _translated(model, variables, source, tokenizer)
    else:
        tokens = _encoded(
            "target",
            target,
            tokenizer,
            lambda reader, text: [*reader.decoder_opening, *reader.encode_many([text])[0]],
        )
    _check("target", tokens, config.max_length, config.vocab_size)
    return EncodedText(tokens, source)


def check_tokens(model: LanguageModel, text: EncodedText) -> None:
    """Raises ValueError if the model or a page cannot process an encoded text."""
    config = model.config
    _check("text", text.tokens, config.max_length, config.vocab_size)
    if text.source is not None:
        check_reads_text(config)
        _check("source", text.source, config.longest_source, config.num_source_ids)


def text_frame(config: ModelConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids before and after the text or, for a model with a source, the target."""
    if config.reads_source:
        return list(tokenizer.decoder_opening), []
    if config.bidirectional:
        return list(tokenizer.before), list(tokenizer.after)
    # A text that the model continues must not end with an end token.
    return list(tokenizer.text_opening), []


# Symbols for invisible characters. A text is ambiguous as a label if it is empty, contains one of
# these symbols or ends like a token id.
_SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\t": "→"})
_UNCLEAR = re.compile(r"\A\Z|[·⏎→]|#\d+\Z")


def token_names(tokenizer: Tokenizer | None, ids: Iterable[int]) -> list[str]:
    r"""Returns a unique label for each token id, for pages and plots.

    A label is the text that the token appends to a preceding text. Spaces, line feeds and tabs
    become `·`, `⏎` and `→`, and other invisible characters become escapes such as `\xa0`. If the
    text does not identify the token, the id is added: `the #4`. The label of a token without text
    is `#4`.
    """
    ids = [int(token) for token in ids]
    context = _context(tokenizer)
    texts = {token: _token_text(tokenizer, context, token) for token in set(ids)}
    uses = Counter(text for text in texts.values() if not _UNCLEAR.search(text))
    names = {
        token: text.translate(_SIGNS) + ("" if uses[text] == 1 else f" #{token}")
        for token, text in texts.items()
    }
    return [names[token].lstrip(" ") for token in ids]


def _context(tokenizer: Tokenizer | None) -> list[int]:
    """Returns a list with one token that decodes to a word, or [] if there is no such token.

    Many tokenizers drop the space before the first word of a text, so that `▁the` and `the` both
    decode to "the". After a token that is a word, `▁the` and `the` decode to different texts.
    """
    if tokenizer is None:
        return []
    words = (token for token in tokenizer.text_ids if tokenizer.decode([token]).strip().isalnum())
    return [*islice(words, 1)]


def _token_text(tokenizer: Tokenizer | None, context: list[int], token: int) -> str:
    """Returns a token's text, its bytes if they are not UTF-8, or the name of a special token."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return ""
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, token])
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode([token])
    # The decoder returns U+FFFD for bytes that are not valid UTF-8.
    if "\ufffd" in text:
        read = getattr(tokenizer, "token_bytes", lambda _: b"")
        text = "".join(f"\\x{byte:02x}" for byte in read(token))
    return "".join(map(_with_glyph, text or tokenizer.token_name(token)))


def _with_glyph(character: str) -> str:
    """Escapes an invisible character, unless `_SIGNS` has a symbol for it."""
    if character.isprintable() or ord(character) in _SIGNS:
        return character
    return character.encode("unicode_escape").decode()


def _encoded(
    name: str,
    text: str | Sequence[int],
    tokenizer: Tokenizer | None,
    encode: Callable[[Tokenizer, str], list[int]],
) -> list[int]:
    """Returns the token ids of `text`, which is a string or already a list of token ids."""
    if not isinstance(text, str):
        ids = np.asarray(text)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} is {ids.dtype} {ids.shape}; it must be a text or a list of token ids"
            )
        return ids.tolist()
    if tokenizer is None:
        raise ValueError(f"tokenizer is None, so {name} must be a list of token ids")
    if not text:
        raise ValueError(f"{name} is empty; give at least one character")
    return encode(tokenizer, text)


def _check(name: str, tokens: Sequence[int], max_length: int, vocab_size: int) -> None:
    """Raises ValueError if the model or the page cannot process these tokens."""
    if not tokens:
        raise ValueError(f"{name} is empty; give at least one token")
    if len(tokens) > max_length:
        raise ValueError(f"{name} has {len(tokens)} tokens; this model reads at most {max_length}")
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"{name} has {len(tokens)} tokens; a page shows at most {MOST_TOKENS}")
    wrong = next((x for x in tokens if not 0 <= x < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{name} has the id {wrong}; this model's ids are 0 … {vocab_size - 1}")


def _translated(
    model: LanguageModel, variables: Weights, source: list[int], tokenizer: Tokenizer | None
) -> list[int]:
    """Translates the source greedily. Returns the start tokens and the translation."""
    from jaxformer.decoding.generate import generate
    from jaxformer.decoding.sampling import Sampler

    if tokenizer is None:
        raise ValueError(
            "target is None, but without a tokenizer the start token is unknown; pass target"
        )
    opening, limit = tokenizer.decoder_opening, model.config.max_length
    found = generate(
        model,
        variables,
        [opening],
        max_new_tokens=max(1, min(MOST_TARGET_TOKENS, limit - len(opening))),
        sampler=Sampler(temperature=0.0),
        stop_tokens=tokenizer.stop_tokens,
        source=[source],
    )
    new = np.asarray(found.tokens)[0, : int(np.asarray(found.lengths)[0])].tolist()
    return [*opening, *(token for token in new if token not in tokenizer.stop_tokens)]
