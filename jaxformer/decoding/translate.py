"""Batched translation with encoder-decoder models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxformer.decoding.autoregressive import pack_weights
from jaxformer.decoding.beam import beam_search, resolve_beam_width
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.config.encoder import check_reads_text
from jaxformer.models.language_model import LanguageModel


class TargetTokenizer(Protocol):
    """Interface of the tokenizers that `translate_ids` accepts.

    Attributes:
        stop_tokens: ids, each of which ends a text.
    """

    stop_tokens: tuple[int, ...]

    @property
    def decoder_opening(self) -> list[int]:
        """The token ids with which the decoder's input begins."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids to a text."""


def translate_ids(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokenizer: TargetTokenizer,
    sources: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int | None = None,
    beam_width: int | None = None,
    batch_size: int = 64,
) -> list[str]:
    """Translates texts by beam search, in batches of texts of similar lengths.

    The translation of a text without tokens is empty.

    Args:
        model: an encoder-decoder.
        variables: the model's variables.
        tokenizer: the model's tokenizer.
        sources: the ids of each text, from `tokenizer.encode_source`.
        max_new_tokens: maximum number of tokens per translation. Defaults to the largest number
            that the model's `max_length` allows.
        beam_width: number of hypotheses per text. Beam search with one hypothesis is greedy.
            For the default, see `beam_search`.
        batch_size: number of texts per batch.

    Raises:
        ValueError: The model is not an encoder-decoder, or a text is longer than the model accepts.
    """
    check_translates(model)
    beam_width = resolve_beam_width(model, beam_width)
    ready, found = pack_weights(model, variables), [""] * len(sources)
    for number, source in enumerate(sources, 1):
        if len(source) > model.config.longest_source:
            raise ValueError(
                f"text {number} has {len(source)} tokens, more than the model's "
                f"max_source_length ({model.config.longest_source})"
            )
    nonempty = [i for i, source in enumerate(sources) if len(source)]
    if nonempty:
        some = [sources[i] for i in nonempty]
        opening = len(tokenizer.decoder_opening)
        room = model.generation.most_new_tokens(opening, model.config.max_length)
        limits = (max_new_tokens, room, model.config.max_length - opening)
        most = min(limit for limit in limits if limit is not None)
        outputs = _decode(model, ready, tokenizer, some, most, beam_width, batch_size)
        for i, ids in zip(nonempty, outputs, strict=True):
            found[i] = tokenizer.decode(ids)
    return found


def check_translates(model: LanguageModel) -> None:
    """Raises ValueError unless the model is an encoder-decoder whose source is a text."""
    if not model.config.reads_source:
        raise ValueError(
            f"model has class {type(model).__name__}, but translation needs an encoder-decoder"
        )
    check_reads_text(model.config)


def _decode(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokenizer: TargetTokenizer,
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
    return [sequence[:length].tolist() for sequence, length in zip(tokens, lengths, strict=True)]
