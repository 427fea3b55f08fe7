"""From text to what a run reads: tokenizer, token files and the compressors' scores, made once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.run import RunFolder, write_whole
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.config import TrainingConfig
from jaxformer.training.corpus import Document, baselines, read_documents, split, standard_library
from jaxformer.training.data import TokenStream, open_tokens, write_tokens


class Prepared(NamedTuple):
    """What a run reads. held_out: documents as tokens, each with the end-of-text in front;
    baselines: bits per byte of gzip and xz on the held-out text."""

    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream
    baselines: dict[str, float]

    @property
    def held_out_documents(self) -> list[np.ndarray]:
        ids = self.held_out.ids
        return np.split(ids, np.flatnonzero(ids == self.tokenizer.end_of_text)[1:])


def gather(paths: Sequence[Path]) -> tuple[list[Document], list[str]]:
    """(documents, why others were skipped) at `paths`; without paths, the standard library."""
    return read_documents(paths) if paths else (standard_library(), [])


def prepare(folder: RunFolder, config: TrainingConfig, paths: Sequence[Path], say) -> Prepared:
    """Read the text, hold some out, train the tokenizer and write the token files.

    What an earlier start of the same run has finished is taken as it is. `say` gets one line for
    each thing done.
    """
    scores = folder.tokens / "baselines.json"
    if not scores.exists():
        documents, skipped = gather(paths)
        check_corpus(documents, config)
        train, held_out = split(documents, config.held_out)
        folder.tokens.mkdir(parents=True, exist_ok=True)
        _list_documents(folder, train, held_out, skipped)
        size = sum(document.num_bytes for document in documents)
        say(
            f"text: {len(documents)} documents, {size / 1e6:.1f} MB; skipped {len(skipped)} "
            f"(listed in {folder.documents})"
        )
        tokenizer = Tokenizer.train((d.text for d in train), config.model.vocab_size)
        tokenizer.save(folder.tokenizer)
        write_tokens(train, tokenizer, folder.train_tokens)
        write_tokens(held_out, tokenizer, folder.held_out_tokens)
        write_whole(scores, json.dumps(baselines(held_out)))
    prepared = Prepared(
        Tokenizer.load(folder.tokenizer),
        open_tokens(folder.train_tokens),
        open_tokens(folder.held_out_tokens),
        json.loads(scores.read_text()),
    )
    for name, stream in (("training", prepared.train), ("held out", prepared.held_out)):
        say(
            f"{name}: {stream.num_documents} documents, {stream.num_bytes / 1e6:.2f} MB, "
            f"{len(stream.ids) / 1e6:.2f} M tokens"
        )
    return prepared


def fit_vocabulary(config: TrainingConfig, tokenizer: Tokenizer) -> TrainingConfig:
    """The config with the vocabulary that was learnt, which a small text leaves below what was
    asked for: an id that stands for no text must not be there to be generated."""
    return replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))


def check_corpus(documents: Sequence[Document], config: TrainingConfig) -> None:
    """Refuse a text that cannot fill one window, whatever the tokenizer (a token is ≥ 1 byte)."""
    size = sum(document.num_bytes for document in documents)
    if size * (1 - config.held_out) < config.window + 1:
        raise ValueError(
            f"the text has {size} bytes, too few for one window of {config.window} tokens; "
            "give more text or a smaller --window-length"
        )


def _list_documents(folder, train, held_out, skipped):
    lines = [f"train     {d.num_bytes:9d}  {d.name}" for d in train]
    lines += [f"held out  {d.num_bytes:9d}  {d.name}" for d in held_out]
    lines += [f"skipped              {reason}" for reason in skipped]
    write_whole(folder.documents, "\n".join(lines) + "\n")
