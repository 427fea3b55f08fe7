"""From text to what a run reads: tokenizer, token files and the compressors' scores, made once."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.load import run_tokenizer
from jaxformer.artifacts.run import RunFolder, read_whole, write_whole
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import NUM_BYTES, Tokenizer, cut
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.training.config import HiddenTraining, Inputs, TextTraining
from jaxformer.training.data.corpus import Documents, read_documents, standard_library, total_size
from jaxformer.training.data.documents import Document
from jaxformer.training.data.held_out import Repeated, baselines, repeated_lines
from jaxformer.training.data.split import DEFAULT_SPLIT, split
from jaxformer.training.data.tokens import TokenStream, open_tokens, write_tokens
from jaxformer.training.screen import Screen

# A tokenizer learns from so much text at most: its merges hardly change beyond, and what it keeps
# of the words in memory does.
TOKENIZER_BYTES = 64_000_000
_REASONS = 3  # why a file was left out, on the screen
_SAMPLED_TOGETHER = 1 << 14  # characters; the library works on 256 such pieces at once


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


def gather(inputs: Inputs, config: TextTraining, screen: Screen) -> tuple[Documents, list[str]]:
    """(documents, why others were skipped) of the text; without one, the standard library.

    ValueError if there is no text, or too little for one window of this config.
    """
    if inputs.origin is None:
        _refuse_beginning(config)
    paths = inputs.text
    with _megabytes(screen, total_size(paths), "reading") as read:
        documents, skipped = (
            read_documents(paths, config.text_field, read) if paths else (standard_library(), [])
        )
    if documents.num_bytes * (1 - _how_much(config)[0]) < config.window + 1:  # a token has a byte
        raise ValueError(
            f"the text has {documents.num_bytes} bytes, too few for one window of {config.window} "
            "tokens; give more text, or a smaller --window-length or --max-length"
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


def write_data(
    folder: RunFolder, config: TextTraining, documents: Documents, skipped, screen: Screen
) -> None:
    """Hold some of the text out, train the tokenizer on the rest, unless the folder has that of
    what the run began from, and write the token files.

    ValueError if the rest comes to fewer tokens than a window has.
    """
    train, held_out = split(documents, *_how_much(config))
    folder.tokens.mkdir(parents=True, exist_ok=True)
    if skipped:
        more = f" … {folder.documents} has them all" if len(skipped) > _REASONS else ""
        reasons = "".join(f"\n  {reason}" for reason in skipped[:_REASONS])
        screen.say(f"left out, in part or whole: {len(skipped):,} files{reasons}{more}")
    repeated = repeated_lines(train, held_out)
    if repeated.lines:
        screen.say(str(repeated))
    _list_documents(folder, train, held_out, skipped, repeated)
    tokenizer = given_tokenizer(folder) or _new_tokenizer(folder, config, documents, train, screen)
    after = () if _hides(config) else _ending(tokenizer)
    with _megabytes(screen, documents.num_bytes, "tokenising") as done:
        stream = write_tokens(train, tokenizer, folder.train_tokens, done, after=after)
    num_tokens = len(stream.ids)
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
    return Prepared(tokenizer, train, held_out, read_whole(folder.baselines))


def given_tokenizer(folder: RunFolder) -> Tokenizer | Subwords | None:
    """That of the checkpoint which a run began from; None: it is to be trained."""
    began = folder.holds_run and "from" in folder.read_config()
    return run_tokenizer(folder) if began else None


def _new_tokenizer(folder, config: TextTraining, documents, train, screen: Screen) -> Tokenizer:
    """Learnt from the text to train on, or from a part of it, and kept in the folder."""
    share = min(1.0, TOKENIZER_BYTES / documents.num_bytes)
    if share < 1:
        screen.say(f"tokenizer: learns from {share:.1%} of the text, taken from all over it")
    texts = _sample(train, share)
    tokenizer = Tokenizer.train(texts, config.model.vocab_size, mask=_hides(config))
    tokenizer.save(folder.tokenizer)
    return tokenizer


def _ending(tokenizer) -> list[int]:
    """What stands after a document that is learnt from: its end, unless what the next one begins
    with says it."""
    end = tokenizer.end_of_text
    return [] if end is None or end in tokenizer.opening else [end]


def _hides(config: TextTraining) -> bool:
    """Whether tokens are hidden, and so need one that stands for them."""
    return isinstance(config, HiddenTraining)


def _how_much(config: TextTraining) -> tuple[float, float, float]:
    """(fraction, minimum_bytes, maximum_bytes) to hold out."""
    return DEFAULT_SPLIT if config.held_out is None else (config.held_out, 0, math.inf)


def _sample(documents: Iterable[Document], share: float) -> Iterator[str]:
    """About that share of the text: pieces from all over it, cut between words."""
    room = 0.0
    for document in documents:
        for piece in cut(document.pieces(), _SAMPLED_TOGETHER):
            room += share * len(piece)
            if room >= len(piece):
                room -= len(piece)
                yield piece


@contextmanager
def _megabytes(screen: Screen, num_bytes: int, name: str) -> Iterator[Callable[[int], None]]:
    """A progress bar; gives a function of how many bytes are done."""
    with screen.count(round(num_bytes / 1e6), name, "MB") as show:
        yield lambda done: show(round(done / 1e6))


def _list_documents(folder: RunFolder, train, held_out, skipped, repeated: Repeated) -> None:
    """documents.txt: a line for each file; its records are counted."""
    temporary = folder.documents.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for part, documents in (("train   ", train), ("held out", held_out)):
            for name, some in groupby(documents, lambda document: document.name):
                sizes = [document.num_bytes for document in some]
                records = f" ({len(sizes):,} records)" if len(sizes) > 1 else ""
                file.write(f"{part}  {sum(sizes):9d}  {name}{records}\n")
        file.writelines(f"skipped              {reason}\n" for reason in skipped)
        file.write(f"{repeated}\n")
    temporary.replace(folder.documents)
