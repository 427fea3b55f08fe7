"""Tokens of the page: checks a text, encodes it, and names tokens for the screen."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel

MOST_TOKENS = 512
MOST_TARGET_TOKENS = 48  # of a translation that the model makes itself


class EncodedText(NamedTuple):
    """Token ids that the model reads.

    Attributes:
        tokens: The ids of the text; for a model that reads a source, those of the target.
        source: The ids of the source; None if the model reads none.
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
    tokenizer: Any,
    target: str | Sequence[int] | None,
) -> EncodedText:
    """Checks and encodes the texts; see `explain` for the arguments.

    Raises:
        ValueError: A text is empty or too long, or a string has no tokenizer.
    """
    config = model.config
    if not config.reads_source:
        if target is not None:
            raise ValueError(f"target was given, but a {type(model).__name__} reads no source")

        def encode(text: str) -> list[int]:  # nothing follows a text that is to be continued
            ends = (tokenizer.text_opening, ())
            before, after = (tokenizer.before, tokenizer.after) if config.bidirectional else ends
            return [*before, *tokenizer.encode_many([text])[0], *after]

        tokens = _encoded("text", text, tokenizer, encode)
        _check("text", tokens, config.max_length, config.vocab_size)
        return EncodedText(tokens)
    source = _encoded("text", text, tokenizer, lambda text: tokenizer.encode_source(text))
    _check("text", source, config.longest_source, config.num_source_ids)
    if target is None:
        tokens = _translated(model, variables, source, tokenizer)
    else:
        tokens = _encoded(
            "target",
            target,
            tokenizer,
            lambda text: [*tokenizer.decoder_opening, *tokenizer.encode_many([text])[0]],
        )
    _check("target", tokens, config.max_length, config.vocab_size)
    return EncodedText(tokens, source)


# Signs of characters that have no glyph. A text is unclear if it is empty, contains such a sign
# itself or ends like an id.
_SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\t": "→"})
_UNCLEAR = re.compile(r"\A\Z|[·⏎→]|#\d+\Z")


def token_names(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    r"""Returns a name of each id for pages and pictures; different ids have different names.

    A name is the text that the token adds to a text before it. Spaces, line feeds and tabs are
    shown as `·`, `⏎` and `→`, and other characters without a glyph as escapes, such as `\xa0`. If
    this does not identify the token, its id follows: `the #4`. A token without text has the name
    `#4`.
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


def _context(tokenizer: Any) -> list[int]:
    """Returns a token after which every token is decoded as the continuation of a text.

    Many tokenizers drop the space before the first word of a text, so that `▁the` and `the` alone
    both decode to "the".
    """
    ids = () if tokenizer is None else tokenizer.text_ids
    return next(([token] for token in ids if tokenizer.decode([token]).strip().isalnum()), [])


def _token_text(tokenizer: Any, context: list[int], token: int) -> str:
    """Returns the text of a token: its bytes if they are no text, its name if it has none."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return ""
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, token])
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode([token])
    if "\ufffd" in text:  # bytes that are no text
        read = getattr(tokenizer, "token_bytes", lambda _: b"")
        text = "".join(f"\\x{byte:02x}" for byte in read(token))
    return "".join(map(_with_glyph, text or tokenizer.name_of(token)))


def _with_glyph(character: str) -> str:
    """Returns an escape for a character without a glyph, except for those in `_SIGNS`."""
    if character.isprintable() or ord(character) in _SIGNS:
        return character
    return character.encode("unicode_escape").decode()


def _encoded(
    name: str, text: str | Sequence[int], tokenizer: Any, encode: Callable[[str], list[int]]
) -> list[int]:
    """Returns the ids of a text, which may be ids already."""
    if not isinstance(text, str):
        ids = np.asarray(text)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} is {ids.dtype} {ids.shape}; it must be a text or a list of ids"
            )
        return ids.tolist()
    if tokenizer is None:
        raise ValueError(f"tokenizer is None; without one, {name} must be a list of token ids")
    if not text:
        raise ValueError(f"{name} is empty; give at least one character")
    return encode(text)


def _check(name: str, tokens: Sequence[int], max_length: int, vocab_size: int) -> None:
    """Raises ValueError unless the model and the page can show these tokens."""
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
    model: LanguageModel, variables: Weights, source: list[int], tokenizer: Any
) -> list[int]:
    """Returns the opening and the model's greedy translation of the source."""
    from jaxformer.decoding.generate import generate
    from jaxformer.decoding.sampling import Sampler

    if tokenizer is None:
        raise ValueError("target is None, and without a tokenizer no token is known to begin one")
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
