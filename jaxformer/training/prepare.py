"""From text to what a run reads: tokenizer, token files and the compressors' scores, made once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.run import RunFolder, write_whole
from jaxformer.artifacts.tokenizer import NUM_BYTES, Tokenizer
from jaxformer.training.config import HiddenTraining, TextTraining
from jaxformer.training.corpus import (
    DEFAULT_SPLIT,
    Document,
    baselines,
    read_documents,
    split,
    standard_library,
)
from jaxformer.training.tokens import TokenStream, open_tokens, write_tokens


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

    @property
    def held_out_beginning(self) -> str:
        return self.tokenizer.decode(self.held_out.ids[:200].tolist())

    def description(self) -> list[str]:
        """How much there is of each part, in lines."""
        total = self.train.num_bytes + self.held_out.num_bytes
        return [
            f"{name}: {stream.num_bytes:,} bytes ({stream.num_bytes / total:.1%}), "
            f"{len(stream.ids):,} tokens, in {stream.num_documents:,} documents"
            for name, stream in (("training", self.train), ("held out", self.held_out))
        ]


def is_prepared(folder: RunFolder) -> bool:
    """Whether an earlier start of this run has read its text to the end."""
    return folder.baselines.exists()


def gather(paths: Sequence[Path], config: TextTraining) -> tuple[list[Document], list[str]]:
    """(documents, why others were skipped) at `paths`; without paths, the standard library.

    ValueError if there is no text, or too little for one window of this config.
    """
    special = ("the end of text", *["the mask"] * _hides(config))
    if config.model.vocab_size < NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size is {config.model.vocab_size}; a byte-level tokenizer needs at least "
            f"{NUM_BYTES + len(special)} ({', '.join([f'{NUM_BYTES} bytes', *special])})"
        )
    documents, skipped = read_documents(paths) if paths else (standard_library(), [])
    size = sum(document.num_bytes for document in documents)
    if size * (1 - _how_much(config)[0]) < config.window + 1:  # a token is at least a byte
        raise ValueError(
            f"the text has {size} bytes, too few for one window of {config.window} tokens; "
            "give more text, or a smaller --window-length or --max-length"
        )
    return documents, skipped


def write_data(folder: RunFolder, config: TextTraining, documents, skipped) -> None:
    """Hold some of the text out, train the tokenizer on the rest and write the token files.

    ValueError if the rest comes to fewer tokens than a window has.
    """
    train, held_out = split(documents, *_how_much(config))
    folder.tokens.mkdir(parents=True, exist_ok=True)
    _list_documents(folder, train, held_out, skipped)
    texts, size = (d.text for d in train), config.model.vocab_size
    tokenizer = Tokenizer.train(texts, size, mask=_hides(config))
    tokenizer.save(folder.tokenizer)
    num_tokens = len(write_tokens(train, tokenizer, folder.train_tokens).ids)
    if num_tokens < config.window + 1:
        raise ValueError(
            f"the text to train on has {num_tokens} tokens, too few for one window of "
            f"{config.window}; give more text, or a smaller --window-length or --max-length"
        )
    write_tokens(held_out, tokenizer, folder.held_out_tokens)
    write_whole(folder.baselines, json.dumps(baselines(held_out)))  # last: says that all is there


def read_data(folder: RunFolder) -> Prepared:
    """What `write_data` wrote; ValueError if the tokens are not of the tokenizer beside them."""
    tokenizer = Tokenizer.load(folder.tokenizer)
    paths = (folder.train_tokens, folder.held_out_tokens)
    train, held_out = map(open_tokens, paths)
    for path, stream in zip(paths, (train, held_out), strict=True):
        if stream.tokenizer != tokenizer.fingerprint:
            raise ValueError(f"{path} was made by another tokenizer than {folder.tokenizer}")
    return Prepared(tokenizer, train, held_out, json.loads(folder.baselines.read_text()))


def _hides(config: TextTraining) -> bool:
    """Whether tokens are hidden, and so need one that stands for them."""
    return isinstance(config, HiddenTraining)


def _how_much(config: TextTraining) -> tuple[float, int]:
    """(fraction, minimum_bytes) to hold out."""
    return DEFAULT_SPLIT if config.held_out is None else (config.held_out, 0)


def _list_documents(folder, train, held_out, skipped):
    lines = [f"train     {d.num_bytes:9d}  {d.name}" for d in train]
    lines += [f"held out  {d.num_bytes:9d}  {d.name}" for d in held_out]
    lines += [f"skipped              {reason}" for reason in skipped]
    write_whole(folder.documents, "\n".join(lines) + "\n")
