"""Preparation of text, and the base class of the tasks that train on text."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer, cut
from jaxformer.artifacts.files import json_text, read_whole, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.spelled_tokens import report_special_tokens, spelled_tokens
from jaxformer.artifacts.token_bytes import NUM_BYTES
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import parsing_special
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.config import Inputs, MaskedTokensTraining, TextTraining
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
from jaxformer.training.data.tokens import TokenStream, base_tokenizer, open_streams, write_tokens
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.screen import Screen

# A tokenizer is trained on at most this many bytes of text. More text needs more memory for the
# words, but barely changes the merges.
TOKENIZER_BYTES = 64_000_000
# The documents, and a line of text for each skipped file.
Gathered = tuple[Documents, list[str]]

# The screen shows at most this many of the skipped files.
_REASONS = 3

# A sample of the text consists of pieces with about this many characters. The pieces are small to
# save memory, because the package `tokenizers` processes 256 pieces in a batch.
_SAMPLED_TOGETHER = 1 << 14


class Prepared(NamedTuple):
    """The prepared data of a run.

    Attributes:
        tokenizer: The tokenizer of the text.
        train: The tokens of the training part.
        held_out: The tokens of the held-out part. In both parts, each document begins with the
            tokenizer's opening tokens.
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
        """Returns lines of text about the size of the training and held-out parts."""
        total = self.train.num_bytes + self.held_out.num_bytes
        return [
            f"{name}: {stream.num_bytes:,} bytes ({stream.num_bytes / total:.1%}), "
            f"{len(stream.ids):,} tokens, {stream.num_documents:,} documents"
            for name, stream in (("training", self.train), ("held out", self.held_out))
        ]


def read_data(folder: RunFolder) -> Prepared:
    """Reads the files that `TextTask.write` wrote.

    Raises:
        ValueError: A token file was not written with the folder's tokenizer.
    """
    tokenizer = run_tokenizer(folder)
    train, held_out = open_streams(folder, [folder.train_tokens, folder.held_out_tokens], tokenizer)
    return Prepared(tokenizer, train, held_out, read_whole(folder.baselines, dict[str, float]))


@dataclass(frozen=True)
class TextTask:
    """Base class of the tasks on tokenised text with a held-out part.

    Attributes:
        config: The settings of the run.
        data: The tokenizer, and the tokens of the training and held-out parts.
    """

    config: TextTraining
    data: Prepared

    @classmethod
    def gather(cls, inputs: Inputs, config: TextTraining, screen: Screen) -> Gathered:
        """Reads and checks the text of a run, by default Python's standard library.

        Args:
            inputs: The paths to read.
            config: The settings of the run.
            screen: Shows progress.

        Returns:
            (the documents, a line for each skipped file).

        Raises:
            ValueError: The text is missing or shorter than a window, or the inputs are pairs.
        """
        if inputs.source or inputs.target:
            raise ValueError(
                "--source and --target are for models that train on pairs, but this model trains "
                "on text; give TEXT instead"
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
        # A token has at least one byte.
        most_tokens = documents.num_bytes * (1 - _how_much(config)[0])
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

        If the run folder already contains the tokenizer of a checkpoint, no tokenizer is trained.

        Args:
            folder: The run folder.
            config: The settings of the run.
            gathered: The data that `gather` returned.
            screen: Shows progress.

        Raises:
            ValueError: The training part has fewer tokens than a window, or the held-out part is
                empty.
        """
        documents, skipped = gathered
        given = base_tokenizer(folder)
        if given is not None and not given.lossless:
            with _megabytes(screen, documents.num_bytes, "comparing") as compared:
                alike = token_digests(documents, given, compared)
            skipped = [*skipped, *documents.drop_alike(alike)]
        train, held_out = split(documents, *_how_much(config))
        folder.tokens.mkdir(parents=True, exist_ok=True)
        if skipped:
            more = f" … (all in {folder.documents})" if len(skipped) > _REASONS else ""
            reasons = "".join(f"\n  {reason}" for reason in skipped[:_REASONS])
            screen.say(f"skipped {len(skipped):,} files, partly or completely:{reasons}{more}")
        repeated = repeated_lines(train, held_out, *([given.normalized] if given else ()))
        if repeated.lines:
            screen.say(str(repeated))
        _list_documents(folder, train, held_out, skipped, repeated)
        tokenizer = given or _new_tokenizer(folder, config, documents, train, screen)
        found = spelled_tokens(tokenizer, text_parts(documents))
        if (report := report_special_tokens(tokenizer, found, "the text")) is not None:
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
            raise ValueError("the held-out text has no tokens; give more text")
        # The baselines are written last: if their file exists, all other files are complete.
        write_whole(folder.baselines, json_text(baselines(held_out)))

    @classmethod
    def read(cls, folder: RunFolder, config: TextTraining) -> Self:
        """Reads the files that `write` wrote."""
        return cls(config, read_data(folder))

    @property
    def objective(self) -> CrossEntropy:
        """Cross-entropy of the target tokens."""
        return CrossEntropy(self.config.label_smoothing)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text."""
        return self.data.tokenizer

    def prepare(self, folder: RunFolder, model: LanguageModel, params: Weights | None) -> Self:
        """Returns the task, which needs no initial parameters."""
        return self

    def description(self) -> list[str]:
        """Returns lines of text about the size of the training and held-out parts."""
        return self.data.description()


def _check_new_model(config: TextTraining) -> None:
    """Raises ValueError if vocab_size is too small, or if learned positions stay untrained."""
    model, special = config.model, ["the end of text", *["the mask"] * _hides(config)]
    if model.vocab_size < NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size is {model.vocab_size}; a byte-level tokenizer needs at least "
            f"{NUM_BYTES + len(special)} ({', '.join([f'{NUM_BYTES} bytes', *special])})"
        )
    if config.window < model.max_length and model.positions == "learned":
        raise ValueError(
            f"window_length is {config.window_length}; with learned positions it must be "
            f"max_length ({model.max_length}), because later positions would stay untrained"
        )


def _new_tokenizer(
    folder: RunFolder, config: TextTraining, documents: Documents, train: SplitPart, screen: Screen
) -> Tokenizer:
    """Trains a tokenizer on the training part, or on a sample of it, and saves the tokenizer."""
    share = min(1.0, TOKENIZER_BYTES / documents.num_bytes)
    if share < 1:
        screen.say(f"tokenizer: trained on {share:.1%} of the text, sampled evenly")
    model, mask = config.model, _hides(config)
    tokenizer = ByteTokenizer.train(_sample(train, share), model.vocab_size, mask=mask)
    tokenizer.save(folder.tokenizer)
    return parsing_special(tokenizer) if config.parse_special else tokenizer


def _ending(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids to append to each training document.

    The only id is the end-of-text token. The list is empty if there is no such token, or if the
    opening tokens of a document contain it.
    """
    end = tokenizer.end_of_text
    return [] if end is None or end in tokenizer.opening else [end]


def _hides(config: TextTraining) -> bool:
    """Returns whether the run masks tokens, so that the tokenizer needs a mask token."""
    return isinstance(config, MaskedTokensTraining)


def _how_much(config: TextTraining) -> tuple[float, float, float]:
    """Returns (fraction, minimum_bytes, maximum_bytes) for `split`."""
    return (
        DEFAULT_SPLIT
        if config.validation_fraction is None
        else (config.validation_fraction, 0, math.inf)
    )


def _sample(documents: Iterable[AnyDocument], share: float) -> Iterator[str]:
    """Yields about `share` of the text, in evenly spaced pieces that end between words."""
    room = 0.0
    for document in documents:
        for piece in cut(document.pieces(), _SAMPLED_TOGETHER):
            room += share * len(piece)
            if room >= len(piece):
                room -= len(piece)
                yield piece


@contextmanager
def _megabytes(screen: Screen, num_bytes: int, name: str) -> Generator[Callable[[int], None]]:
    """Shows a progress bar. Yields a function that sets the number of processed bytes."""
    with screen.count(round(num_bytes / 1e6), name, "MB") as show:
        yield lambda done: show(round(done / 1e6))


def _list_documents(
    folder: RunFolder, train: SplitPart, held_out: SplitPart, skipped: list[str], repeated: Repeated
) -> None:
    """Writes documents.txt: a line per file with the number of bytes and records."""
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
