"""Base class of the tasks that train on text, and the preparation of the text."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np

from jaxformer.artifacts.byte_tokenizer import NUM_BYTES, ByteTokenizer, cut
from jaxformer.artifacts.files import json_text, read_whole, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.tokenizer import Tokenizer, parsing_special, report_of, spelled_tokens
from jaxformer.training.config import HiddenTraining, Inputs, TextTraining
from jaxformer.training.data.corpus import Documents, read_documents, standard_library, total_size
from jaxformer.training.data.documents import AnyDocument, text_parts
from jaxformer.training.data.split import (
    DEFAULT_SPLIT,
    Repeated,
    SplitPart,
    baselines,
    repeated_lines,
    split,
    token_digests,
)
from jaxformer.training.data.tokens import TokenStream, given_tokenizer, open_streams, write_tokens
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.screen import Screen

# Largest amount of text to train a tokenizer on: more text barely changes its merges, but needs
# more memory for the words.
TOKENIZER_BYTES = 64_000_000
Gathered = tuple[Documents, list[str]]  # the documents, and a line for each skipped file
_REASONS = 3  # number of skipped files on the screen
_SAMPLED_TOGETHER = 1 << 14  # characters per piece; the library processes 256 pieces at once


class Prepared(NamedTuple):
    """The prepared data of a run.

    Attributes:
        tokenizer: The tokenizer of the text.
        train: The tokens of the training part.
        held_out: The tokens of the held-out part. In both, each document begins with the opening
            tokens of the tokenizer.
        baselines: The bits per byte of gzip and xz on the held-out text.
    """

    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream
    baselines: dict[str, float]

    @property
    def held_out_documents(self) -> list[np.ndarray]:
        """Tokens of each held-out document."""
        return self.held_out.split()

    @property
    def held_out_beginning(self) -> str:
        """Text of the first 200 held-out tokens."""
        return self.tokenizer.decode(self.held_out.ids[:200].tolist())

    def description(self) -> list[str]:
        """Returns lines of text about the size of each part."""
        total = self.train.num_bytes + self.held_out.num_bytes
        return [
            f"{name}: {stream.num_bytes:,} bytes ({stream.num_bytes / total:.1%}), "
            f"{len(stream.ids):,} tokens, in {stream.num_documents:,} documents"
            for name, stream in (("training", self.train), ("held out", self.held_out))
        ]


def read_data(folder: RunFolder) -> Prepared:
    """Reads the files of `TextTask.write`.

    Raises:
        ValueError: A file of tokens was made by another tokenizer than that of the folder.
    """
    tokenizer = run_tokenizer(folder)
    train, held_out = open_streams(folder, [folder.train_tokens, folder.held_out_tokens], tokenizer)
    return Prepared(tokenizer, train, held_out, read_whole(folder.baselines, dict[str, float]))


@dataclass(frozen=True)
class TextTask:
    """Base class of the tasks on a tokenised text with a held-out part.

    Attributes:
        config: The settings of the run.
        data: The tokens of both parts.
    """

    config: TextTraining
    data: Prepared

    @classmethod
    def gather(cls, inputs: Inputs, config: TextTraining, screen: Screen) -> Gathered:
        """Reads and checks the text of a run; without TEXT, it is Python's standard library.

        Args:
            inputs: The paths to read.
            config: The settings of the run.
            screen: Shows the progress.

        Returns:
            (the documents, a line for each skipped file).

        Raises:
            ValueError: There is no text, or too little for one window, or pairs are given.
        """
        if inputs.source or inputs.target:
            raise ValueError(
                "--source and --target are for pairs, but this kind of model trains on text; give "
                "TEXT instead"
            )
        if inputs.origin is None:
            _check_new_model(config)
        with _megabytes(screen, total_size(inputs.text), "reading") as read:
            gathered = (
                read_documents(inputs.text, config.text_field, read)
                if inputs.text
                else (standard_library(), [])
            )
        documents, _ = gathered
        if (line := documents.separators()) is not None:
            screen.say(line)
        most_tokens = documents.num_bytes * (1 - _how_much(config)[0])  # a token has a byte
        if most_tokens < config.window + 1:
            raise ValueError(
                f"the text has {documents.num_bytes} bytes, too few for one window of "
                f"{config.window} tokens; give more text, or a smaller --window-length or "
                "--max-length"
            )
        return gathered

    @classmethod
    def write(
        cls, folder: RunFolder, config: TextTraining, gathered: Gathered, screen: Screen
    ) -> None:
        """Splits the text, trains a tokenizer on the training part and writes the token files.

        It trains no tokenizer if the folder has that of the checkpoint from which the run began.

        Args:
            folder: The folder of the run.
            config: The settings of the run.
            gathered: The result of `gather`.
            screen: Shows the progress.

        Raises:
            ValueError: The training part has fewer tokens than a window, or the held-out part none.
        """
        documents, skipped = gathered
        given = given_tokenizer(folder)
        if given is not None and not given.lossless:
            with _megabytes(screen, documents.num_bytes, "comparing") as compared:
                alike = token_digests(documents, given, compared)
            skipped = [*skipped, *documents.drop_alike(alike)]
        train, held_out = split(documents, *_how_much(config))
        folder.tokens.mkdir(parents=True, exist_ok=True)
        if skipped:
            more = f" … (all in {folder.documents})" if len(skipped) > _REASONS else ""
            reasons = "".join(f"\n  {reason}" for reason in skipped[:_REASONS])
            screen.say(f"skipped, in part or completely: {len(skipped):,} files{reasons}{more}")
        repeated = repeated_lines(train, held_out, *([given.normalized] if given else ()))
        if repeated.lines:
            screen.say(str(repeated))
        _list_documents(folder, train, held_out, skipped, repeated)
        tokenizer = given or _new_tokenizer(folder, config, documents, train, screen)
        found = spelled_tokens(tokenizer, text_parts(documents))
        if (report := report_of(tokenizer, found, "the text")) is not None:
            screen.say(report)
        after = () if _hides(config) else _ending(tokenizer)
        with _megabytes(screen, documents.num_bytes, "tokenising") as done:
            stream = write_tokens(train, tokenizer, folder.train_tokens, done, after=after)
        num_tokens = len(stream.ids)
        if num_tokens < config.window + 1:
            raise ValueError(
                f"the training text has {num_tokens} tokens, too few for one window of "
                f"{config.window}; give more text, or a smaller --window-length or --max-length"
            )
        scored = write_tokens(held_out, tokenizer, folder.held_out_tokens)
        if len(scored.ids) == len(tokenizer.opening) * scored.num_documents:
            raise ValueError("the tokenizer makes no tokens from the held-out text; give more text")
        # The last file: its presence shows that all files are complete.
        write_whole(folder.baselines, json_text(baselines(held_out)))

    @classmethod
    def read(cls, folder: RunFolder, config: TextTraining) -> Self:
        """Reads the files of `write`."""
        return cls(config, read_data(folder))

    @property
    def objective(self) -> CrossEntropy:
        """What an update reduces."""
        return CrossEntropy(self.config.label_smoothing)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text."""
        return self.data.tokenizer

    def description(self) -> list[str]:
        """Returns lines of text about the size of each part."""
        return self.data.description()


def _check_new_model(config: TextTraining) -> None:
    """Raises ValueError if vocab_size is too small, or if some positions would not be trained."""
    model, special = config.model, ["the end of text", *["the mask"] * _hides(config)]
    if model.vocab_size < NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size is {model.vocab_size}; a byte-level tokenizer needs at least "
            f"{NUM_BYTES + len(special)} ({', '.join([f'{NUM_BYTES} bytes', *special])})"
        )
    if config.window < model.max_length and model.positions == "learned":
        raise ValueError(
            f"window_length is {config.window_length}; with learned positions it must be "
            f"max_length ({model.max_length}), because later positions would not be trained"
        )


def _new_tokenizer(
    folder: RunFolder, config: TextTraining, documents: Documents, train: SplitPart, screen: Screen
) -> Tokenizer:
    """Trains a tokenizer on the training part, or on a sample of it, and saves it in the folder."""
    share = min(1.0, TOKENIZER_BYTES / documents.num_bytes)
    if share < 1:
        screen.say(f"tokenizer: trained on {share:.1%} of the text, in pieces from all over it")
    model, mask = config.model, _hides(config)
    tokenizer = ByteTokenizer.train(_sample(train, share), model.vocab_size, mask=mask)
    tokenizer.save(folder.tokenizer)
    return parsing_special(tokenizer) if config.parse_special else tokenizer


def _ending(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids after each training document.

    This is the end of text, unless the opening tokens of the next document contain it.
    """
    end = tokenizer.end_of_text
    return [] if end is None or end in tokenizer.opening else [end]


def _hides(config: TextTraining) -> bool:
    """Returns whether the run hides tokens, so that the tokenizer needs a mask token."""
    return isinstance(config, HiddenTraining)


def _how_much(config: TextTraining) -> tuple[float, float, float]:
    """Returns (fraction, minimum_bytes, maximum_bytes) for `split`."""
    return DEFAULT_SPLIT if config.held_out is None else (config.held_out, 0, math.inf)


def _sample(documents: Iterable[AnyDocument], share: float) -> Iterator[str]:
    """Yields about `share` of the text, in pieces from all over it that end between words."""
    room = 0.0
    for document in documents:
        for piece in cut(document.pieces(), _SAMPLED_TOGETHER):
            room += share * len(piece)
            if room >= len(piece):
                room -= len(piece)
                yield piece


@contextmanager
def _megabytes(screen: Screen, num_bytes: int, name: str) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar; yields a function that sets the number of bytes that are done."""
    with screen.count(round(num_bytes / 1e6), name, "MB") as show:
        yield lambda done: show(round(done / 1e6))


def _list_documents(
    folder: RunFolder, train: SplitPart, held_out: SplitPart, skipped: list[str], repeated: Repeated
) -> None:
    """Writes documents.txt: a line per file with its bytes and its number of records."""
    temporary = folder.documents.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for part, documents in (("train   ", train), ("held out", held_out)):
            for name, group in groupby(documents, lambda document: document.name):
                sizes = [document.num_bytes for document in group]
                records = f" ({len(sizes):,} records)" if len(sizes) > 1 else ""
                file.write(f"{part}  {sum(sizes):9d}  {name}{records}\n")
        file.writelines(f"skipped              {reason}\n" for reason in skipped)
        file.write(f"{repeated}\n")
    temporary.replace(folder.documents)
