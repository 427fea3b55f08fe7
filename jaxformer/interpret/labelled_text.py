"""A text as the ids that a model reads, with a label for each token."""

from dataclasses import dataclass
from typing import Any

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.language_model import LanguageModel, Variables

SHOWN = {"\n": "↵", "\t": "⇥", " ": "␣"}


@dataclass(frozen=True)
class Text:
    """A text and, for a model that reads a source, its source.

    Attributes:
        ids: the ids that the model, or its decoder, reads.
        labels: the text of each id.
        source: the ids of the source; None: the model reads none.
        source_labels: the text of each id of the source.
    """

    ids: tuple[int, ...]
    labels: tuple[str, ...]
    source: tuple[int, ...] | None = None
    source_labels: tuple[str, ...] = ()


def read_text(
    model: LanguageModel, variables: Variables, tokenizer: Tokenizer | None, text: str
) -> Text:
    """Encodes a text.

    For a model that reads a source, the text is the source, and the target is the model's own
    translation.

    Args:
        model: the model.
        variables: its variables.
        tokenizer: its tokenizer.
        text: the text.

    Raises:
        ValueError: there is no tokenizer, or the text is empty or longer than the model accepts.
    """
    if tokenizer is None:
        raise ValueError("tokenizer is None; a text needs the tokenizer of its model")
    if not text:
        raise ValueError("text is empty; it must have at least one token")
    if model.config.reads_source:
        source = tuple(tokenizer.encode_source(text))
        ids = (*tokenizer.decoder_opening, *translation(model, variables, tokenizer, source))
        return Text(ids, labels(tokenizer, ids), source, labels(tokenizer, source))
    (words,) = tokenizer.encode_many([text])
    if model.unsupported_reason is None:
        ids = (*tokenizer.opening, *words)
    else:
        ids = (*tokenizer.before, *words, *tokenizer.after)
    if len(ids) > model.config.max_length:
        raise ValueError(
            f"text has {len(ids)} tokens; this model's max_length is {model.config.max_length}"
        )
    return Text(ids, labels(tokenizer, ids))


def translation(
    model: LanguageModel, variables: Variables, tokenizer: Tokenizer, source: tuple[int, ...]
) -> list[int]:
    """Returns the ids of the model's greedy translation, without the token that ends it."""
    from jaxformer.decoding.generate import generate
    from jaxformer.decoding.sampling import Sampler

    opening = tokenizer.decoder_opening
    room = model.config.max_length - len(opening)
    found = generate(
        model,
        variables,
        [opening],
        max_new_tokens=min(room, 2 * len(source) + 16),
        sampler=Sampler(temperature=0.0),
        stop_tokens=tokenizer.stop_tokens,
        source=[source],
    )
    ids = found.tokens[0, : found.lengths[0]].tolist()
    return ids[:-1] if ids and ids[-1] in tokenizer.stop_tokens else ids


def labels(tokenizer: Any, ids: tuple[int, ...]) -> tuple[str, ...]:
    """Returns a short text for each id, with spaces and line breaks visible."""
    return tuple(label(tokenizer, token) for token in ids)


def label(tokenizer: Any, token: int) -> str:
    """Returns the text of one token; the token's name if it has none of its own."""
    text = tokenizer.decode([token])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return tokenizer.name_of(token) or f"<{token}>"
    return "".join(SHOWN.get(c, c) if c.isprintable() or c in SHOWN else "·" for c in text)
