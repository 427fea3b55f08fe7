"""Translating texts by a model that reads a source: in batches, and in the order given."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.decoding.beam import beam_search
from jaxformer.decoding.generate import generate
from jaxformer.decoding.prepared import prepare
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.config.encoder_decoder import ReadsSource


def translate(
    model, variables, tokenizer, texts: Sequence[str], *, beam_width: int = 1, batch_size: int = 64
) -> list[str]:
    """The most probable translation of each text that a beam of that width finds (1: greedy).

    Texts of about one length are translated together; one without a token stays empty. ValueError
    if the model reads no source, or if a text is longer than it accepts.
    """
    sources = [tokenizer.encode_source(text) for text in texts]
    how = {"beam_width": beam_width, "batch_size": batch_size}
    return translate_ids(model, variables, tokenizer, sources, **how)


def translate_ids(
    model, variables, tokenizer, sources, *, beam_width: int = 1, batch_size: int = 64
) -> list[str]:
    """The same of rows of ids."""
    check_translates(model)
    ready, found = prepare(model, variables), [""] * len(sources)
    for number, source in enumerate(sources, 1):
        if len(source) > model.config.max_source_length:
            raise ValueError(
                f"text {number} has {len(source)} tokens; this model's max_source_length is "
                f"{model.config.max_source_length}"
            )
    for rows in _by_length(sources, batch_size):
        some = [sources[row] for row in rows]
        some += [some[0]] * (batch_size - len(rows))  # one shape for all batches
        outputs = _decode(model, ready, tokenizer, some, beam_width)
        for row, ids in zip(rows, outputs, strict=False):
            found[row] = tokenizer.decode(ids)
    return found


def check_translates(model) -> None:
    """ValueError unless the model reads a source."""
    if not isinstance(model.config, ReadsSource):
        raise ValueError(f"model is a {type(model).__name__}; to translate it must read a source")


def _by_length(sources: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """The numbers of the sources that are not empty, in batches, the shortest first."""
    order = [n for n in np.argsort([len(ids) for ids in sources], kind="stable") if len(sources[n])]
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]


def _decode(model, variables, tokenizer, sources, beam_width: int) -> list[list[int]]:
    opening = tokenizer.decoder_opening
    how = {
        "max_new_tokens": model.config.max_length - len(opening),  # whatever else is in the batch
        "stop_tokens": tokenizer.stop_tokens,
        "source": sources,
    }
    prompts = [opening] * len(sources)
    if beam_width == 1:
        out = generate(model, variables, prompts, sampler=Sampler(temperature=0.0), **how)
        tokens, lengths = out.tokens, out.lengths
    else:
        out = beam_search(model, variables, prompts, beam_width=beam_width, **how)
        tokens, lengths = out.tokens[:, 0], out.lengths[:, 0]
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
