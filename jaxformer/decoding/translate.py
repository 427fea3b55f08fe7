"""Translation of texts in batches, by a model that reads a source."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.decoding.autoregressive import prepare
from jaxformer.decoding.beam import beam_search, beam_width_of_call
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.language_model import LanguageModel


def translate_ids(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokenizer: Any,
    sources: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int | None = None,
    beam_width: int | None = None,
    batch_size: int = 64,
) -> list[str]:
    """Returns the most probable translation of each text that a beam search finds.

    A batch has texts of similar lengths. A text without tokens has an empty translation.

    Args:
        model: a model that reads a source.
        variables: its variables.
        tokenizer: its tokenizer.
        sources: the ids of each text, from `tokenizer.encode_source`.
        max_new_tokens: the most tokens of a translation; None: as many as the model accepts.
        beam_width: number of hypotheses of each text; 1: greedy. None: see `beam_search`.
        batch_size: number of texts in a batch.

    Raises:
        ValueError: the model reads no source, or a text is longer than it accepts.
    """
    check_translates(model)
    beam_width = beam_width_of_call(model, beam_width)
    ready, found = prepare(model, variables), [""] * len(sources)
    for number, source in enumerate(sources, 1):
        if len(source) > model.config.longest_source:
            raise ValueError(
                f"text {number} has {len(source)} tokens; this model's max_source_length is "
                f"{model.config.longest_source}"
            )
    rows = [row for row, source in enumerate(sources) if len(source)]
    if rows:
        some = [sources[row] for row in rows]
        opening = len(tokenizer.decoder_opening)
        room = model.generation.most_new_tokens(opening, model.config.max_length)
        limits = (max_new_tokens, room, model.config.max_length - opening)
        most = min(limit for limit in limits if limit is not None)
        outputs = _decode(model, ready, tokenizer, some, most, beam_width, batch_size)
        for row, ids in zip(rows, outputs, strict=True):
            found[row] = tokenizer.decode(ids)
    return found


def check_translates(model: LanguageModel) -> None:
    """Raises ValueError unless the model reads a source."""
    if not model.config.reads_source:
        raise ValueError(f"model is a {type(model).__name__}; to translate it must read a source")


def _decode(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokenizer: Any,
    sources: Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int,
    beam_width: int,
    batch_size: int,
) -> list[list[int]]:
    prompts, stops = [tokenizer.decoder_opening] * len(sources), tokenizer.stop_tokens
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_tokens": stops,
        "source": sources,
        "batch_size": batch_size,
    }
    if beam_width == 1:
        greedy = Sampler(temperature=0.0)
        out = generate(model, variables, prompts, sampler=greedy, **options)
        tokens, lengths = out.tokens, out.lengths
    else:
        best = beam_search(model, variables, prompts, beam_width=beam_width, **options)
        tokens, lengths = best.tokens[:, 0], best.lengths[:, 0]
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
