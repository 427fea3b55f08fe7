"""From text to what a run reads: tokenizer, token files and the compressors' scores, made once."""

import json
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.load import run_tokenizer
from jaxformer.artifacts.run import RunFolder, write_whole
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import NUM_BYTES, Tokenizer
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.training.config import HiddenTraining, Inputs, TextTraining
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
    """What a run reads. held_out: documents as tokens, each with what the tokenizer begins a text
    with, an end of text for ours, in front; baselines: bits per byte of gzip and xz on the
    held-out text."""

    tokenizer: Tokenizer | Subwords
    train: TokenStream
    held_out: TokenStream
    baselines: dict[str, float]

    @property
    def held_out_documents(self) -> list[np.ndarray]:
        ids = self.held_out.ids
        return np.split(ids, np.flatnonzero(ids == self.tokenizer.opening[0])[1:])

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


def gather(inputs: Inputs, config: TextTraining) -> tuple[list[Document], list[str]]:
    """(documents, why others were skipped) of the text; without one, the standard library.

    ValueError if there is no text, or too little for one window of this config.
    """
    if inputs.origin is None:
        _refuse_beginning(config)
    paths = inputs.text
    documents, skipped = read_documents(paths) if paths else (standard_library(), [])
    size = sum(document.num_bytes for document in documents)
    if size * (1 - _how_much(config)[0]) < config.window + 1:  # a token is at least a byte
        raise ValueError(
            f"the text has {size} bytes, too few for one window of {config.window} tokens; "
            "give more text, or a smaller --window-length or --max-length"
        )
    return documents, skipped


def _refuse_beginning(config: TextTraining) -> None:
    """ValueError if a tokenizer of so few tokens cannot be trained, or not all positions learnt."""
    special = ("the end of text", *["the mask"] * _hides(config))
    if config.model.vocab_size < NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size is {config.model.vocab_size}; a byte-level tokenizer needs at least "
            f"{NUM_BYTES + len(special)} ({', '.join([f'{NUM_BYTES} bytes', *special])})"
        )
    model = config.model
    learned = isinstance(model, TransformerConfig) and model.positions == "learned"
    if config.window < model.max_length and learned:
        raise ValueError(
            f"window_length is {config.window_length}; with learned positions it must be "
            f"max_length ({model.max_length}), or those after it are never learnt"
        )


def write_data(folder: RunFolder, config: TextTraining, documents, skipped) -> None:
    """Hold some of the text out, train the tokenizer on the rest, unless the folder has that of
    what the run began from, and write the token files.

    ValueError if the rest comes to fewer tokens than a window has.
    """
    train, held_out = split(documents, *_how_much(config))
    folder.tokens.mkdir(parents=True, exist_ok=True)
    _list_documents(folder, train, held_out, skipped)
    texts, size = (d.text for d in train), config.model.vocab_size
    tokenizer = given_tokenizer(folder)
    if tokenizer is None:
        tokenizer = Tokenizer.train(texts, size, mask=_hides(config))
        tokenizer.save(folder.tokenizer)
    after = () if _hides(config) else _ending(tokenizer)
    num_tokens = len(write_tokens(train, tokenizer, folder.train_tokens, after).ids)
    if num_tokens < config.window + 1:
        raise ValueError(
            f"the text to train on has {num_tokens} tokens, too few for one window of "
            f"{config.window}; give more text, or a smaller --window-length or --max-length"
        )
    write_tokens(held_out, tokenizer, folder.held_out_tokens)
    write_whole(folder.baselines, json.dumps(baselines(held_out)))  # last: says that all is there


def read_data(folder: RunFolder) -> Prepared:
    """What `write_data` wrote; ValueError if the tokens are not of the tokenizer beside them."""
    tokenizer = run_tokenizer(folder)
    paths = (folder.train_tokens, folder.held_out_tokens)
    train, held_out = map(open_tokens, paths)
    for path, stream in zip(paths, (train, held_out), strict=True):
        if stream.tokenizer != tokenizer.fingerprint:
            raise ValueError(f"{path} was made by another tokenizer than {folder.tokenizer}")
    return Prepared(tokenizer, train, held_out, json.loads(folder.baselines.read_text()))


def given_tokenizer(folder: RunFolder) -> Tokenizer | Subwords | None:
    """That of the checkpoint which a run began from; None: it is to be trained."""
    began = folder.holds_run and "from" in folder.read_config()
    return run_tokenizer(folder) if began else None


def _ending(tokenizer) -> list[int]:
    """What stands after a document that is learnt from: its end, unless what the next one begins
    with says it."""
    end = tokenizer.end_of_text
    return [] if end is None or end in tokenizer.opening else [end]


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
