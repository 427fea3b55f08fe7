"""Task of encoder-decoders: predict each target token from the source and the tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from jaxtyping import PRNGKeyArray

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.files import json_text, read_whole, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.spelled_tokens import report_special_tokens, spelled_tokens
from jaxformer.artifacts.token_bytes import NUM_BYTES
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import lowercased, parsing_special
from jaxformer.decoding.translate import translate_ids
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, OnScored, Share, noop
from jaxformer.training.config import Inputs, PairTraining
from jaxformer.training.data.documents import Document
from jaxformer.training.data.pairs import Pair, PairBatches, best_widths, read_pairs, split_pairs
from jaxformer.training.data.tokens import TokenStream, base_tokenizer, open_streams, write_tokens
from jaxformer.training.evaluate import score_pairs
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.screen import Screen
from jaxformer.training.tasks.task import Measure, Score

# A sample shows the translations of this many held-out sources.
SAMPLES = 5


class EncodedPairs:
    """Pairs of (source, target) token ids, read from two token streams.

    The tokenizer's template adds tokens before and after each source.
    """

    def __init__(self, sides: list[TokenStream], tokenizer: Tokenizer):
        """Creates the pairs without copying the tokens.

        Args:
            sides: The tokens of the sources and of the targets.
            tokenizer: The tokenizer of the sources and of the targets.
        """
        self.sides = sides
        self._opening = len(tokenizer.opening)
        self._around = tokenizer.before, tokenizer.after
        self._bounds = [np.append(side.starts, len(side.ids)) for side in sides]

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return self.sides[0].num_documents

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a source and of its target."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        source, target = (
            side.ids[bounds[number] + self._opening : bounds[number + 1]]
            for side, bounds in zip(self.sides, self._bounds, strict=True)
        )
        before, after = self._around
        if before or after:
            source = np.concatenate([np.array(before, int), source, np.array(after, int)])
        return source, target

    @property
    def lengths(self) -> np.ndarray:
        """Length of the longer side of each pair; a target includes its end-of-text token."""
        source, target = (np.diff(bounds) - self._opening for bounds in self._bounds)
        return np.maximum(source + sum(map(len, self._around)), target + 1)

    @property
    def num_targets(self) -> int:
        """Number of target tokens, including an end-of-text token per target."""
        return len(self.sides[1].ids) - (self._opening - 1) * len(self)


@dataclass(frozen=True)
class Pairs:
    """Task on pairs of lines, each with a source and a target."""

    measure: ClassVar[Measure] = Measure("bleu", "BLEU")
    # This cost was measured on two cores. The translations take most of the time.
    scoring_cost: ClassVar[float] = 6.0
    config: PairTraining
    tokenizer: Tokenizer
    train: EncodedPairs
    held_out: EncodedPairs
    references: Sequence[str]
    """Text of the held-out targets before tokenisation, which may not be reversible."""
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def objective(self) -> CrossEntropy:
        """Cross-entropy of the target tokens."""
        return CrossEntropy(self.config.label_smoothing)

    @classmethod
    def gather(cls, inputs: Inputs, config: PairTraining, screen: Screen) -> list[Pair]:
        """Reads and checks the pairs (see `FileTask.gather`)."""
        if inputs.text:
            raise ValueError(
                f"TEXT is {inputs.text[0]}, but this model trains on pairs of lines; replace TEXT "
                "by --source FILE and --target FILE"
            )
        if inputs.source is None:
            raise ValueError(
                "--source is required: this model trains on pairs of lines (--source FILE "
                "--target FILE)"
            )
        if inputs.origin is None and config.model.vocab_size <= NUM_BYTES:
            raise ValueError(
                f"vocab_size is {config.model.vocab_size}; a byte-level tokenizer needs at least "
                f"{NUM_BYTES + 1} ({NUM_BYTES} bytes and an end-of-text token)"
            )
        pairs = read_pairs(inputs.source, inputs.target)
        split_pairs(pairs, config.validation_fraction)
        return pairs

    @classmethod
    def write(
        cls, folder: RunFolder, config: PairTraining, gathered: list[Pair], screen: Screen
    ) -> None:
        """Writes the tokens of the training part and the held-out part (see `FileTask.write`)."""
        given = base_tokenizer(folder)
        # If the run has no tokenizer yet, an untrained byte tokenizer is used, because training it
        # would not change the result of `split_pairs`.
        reader = given or ByteTokenizer.train((), NUM_BYTES + 1)
        reader = lowercased(reader) if config.lowercase else reader
        train, held_out = split_pairs(gathered, config.validation_fraction, reader)
        folder.tokens.mkdir(parents=True, exist_ok=True)
        tokenizer = reader if given else _new_tokenizer(train, config)
        tokenizer.save(folder.tokenizer)
        found = spelled_tokens(tokenizer, (f"{side}\n" for pair in gathered for side in pair))
        if (report := report_special_tokens(tokenizer, found, "the pairs")) is not None:
            screen.say(report)
        lines = []
        for part, pairs in (("train", train), ("held_out", held_out)):
            fitting, left_out = _fitting(pairs, tokenizer, config)
            name = part.replace("_", " ")
            if not fitting:
                raise ValueError(
                    f"no sentence pair of the {name} data fits into max_length "
                    f"({config.model.max_length}) and batch_tokens ({config.batch_tokens}); "
                    "increase these limits"
                )
            for path, side in zip(folder.pairs[part], zip(*fitting, strict=True), strict=True):
                write_tokens([Document("", line) for line in side], tokenizer, path)
            if part == "held_out":
                write_whole(folder.references, json_text([target for _, target in fitting]))
            if left_out:
                screen.say(
                    f"skipped in the {name} part: {len(left_out):,} pairs, such as: {left_out[0]}"
                )
            lines.append(f"{name:9} {len(fitting):9d}  pairs")
            lines += [f"skipped              {what}" for what in left_out]
        write_whole(folder.documents, "\n".join(lines) + "\n")
        # The baselines are written last: if their file exists, all other files are complete.
        write_whole(folder.baselines, json_text({}))

    @classmethod
    def read(cls, folder: RunFolder, config: PairTraining) -> Self:
        """Reads the files that `write` wrote.

        Raises:
            ValueError: A token file was written with a different tokenizer.
        """
        tokenizer = run_tokenizer(folder)
        train, held_out = (
            EncodedPairs(open_streams(folder, folder.pairs[part], tokenizer), tokenizer)
            for part in ("train", "held_out")
        )
        references = read_whole(folder.references, tuple[str, ...])
        return cls(config, tokenizer, train, held_out, references)

    @property
    def num_targets(self) -> int:
        """Number of target tokens in all held-out pairs."""
        return self.held_out.num_targets

    @property
    def part(self) -> float:
        """Fraction of the held-out pairs that every evaluation scores."""
        return min(1.0, self.config.evaluation_pairs / len(self.held_out))

    def prepare(self, folder: RunFolder, model: LanguageModel, params: Weights | None) -> Self:
        """Returns the task, which needs no initial parameters."""
        return self

    def description(self) -> list[str]:
        """Returns lines of text about the size of the training and held-out parts."""
        return [
            f"{name}: {len(pairs):,} pairs, {len(pairs.sides[0].ids):,} and "
            f"{len(pairs.sides[1].ids):,} tokens"
            for name, pairs in (("training", self.train), ("held out", self.held_out))
        ]

    @cached_property
    def _widths(self) -> list[int]:
        lengths = np.concatenate([self.train.lengths, self.held_out.lengths])
        return best_widths(lengths, self.config.lengths)

    def batches(self, share: Share = WHOLE) -> PairBatches:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        config = self.config
        return PairBatches(
            self.train,
            config.batch_tokens,
            self.tokenizer.stop_tokens[0],
            config.seed,
            start=self.tokenizer.decoder_opening[0],
            accumulate=config.gradient_accumulation_steps,
            multiple=1 if config.mesh is None else config.mesh.parts,
            widths=self._widths,
            share=share,
        )

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Scores the model on held-out pairs (see `Task.score`)."""
        total = len(self.held_out)
        number = total if whole else min(self.config.evaluation_pairs, total)
        places = np.linspace(0, total - 1, number).round().astype(int)
        score = score_pairs(
            model,
            variables,
            self.tokenizer,
            [self.held_out[place] for place in places],
            [self.references[place] for place in places],
            tokens=self.config.batch_tokens,
            widths=self._widths,
            bleu_tokenize=self.config.bleu_tokenize,
            on_scored=on_scored,
        )
        return Score(score.loss, score.bleu.score, score.tokens)

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns held-out sources with the model's translations and the reference translations."""
        pairs = [self.held_out[n] for n in range(min(SAMPLES, len(self.held_out)))]
        sources = [source for source, _ in pairs]
        translations = translate_ids(model, variables, self.tokenizer, sources)
        texts = [[self.tokenizer.decode(side.tolist()) for side in pair] for pair in pairs]
        return "\n".join(
            f"{source}\n  → {text}\n  = {target}"
            for (source, target), text in zip(texts, translations, strict=True)
        )

    def example(self) -> list[str]:
        """Returns a command that translates text with the trained model."""
        return ["translate"]


def _new_tokenizer(pairs: list[Pair], config: PairTraining) -> Tokenizer:
    """Trains a tokenizer on both sides of the pairs."""
    texts = (side for pair in pairs for side in pair)
    texts = map(str.lower, texts) if config.lowercase else texts
    tokenizer = ByteTokenizer.train(texts, config.model.vocab_size, split_digits=True)
    tokenizer = lowercased(tokenizer) if config.lowercase else tokenizer
    return parsing_special(tokenizer) if config.parse_special else tokenizer


def _fitting(
    pairs: list[Pair], tokenizer: Tokenizer, config: PairTraining
) -> tuple[list[Pair], list[str]]:
    """Returns the pairs that fit into the model and a batch, and why other pairs are skipped."""
    sides = zip(*(tokenizer.encode_many(side) for side in zip(*pairs, strict=True)), strict=True)
    around = len(tokenizer.before) + len(tokenizer.after)
    model, fitting, left_out = config.model.resolved, [], []
    for pair, (source, target) in zip(pairs, sides, strict=True):
        length, beginning = len(source) + around, repr(pair[0][:40])
        fits = length <= model.max_source_length and len(target) < model.max_length
        if not source or not target:
            left_out.append(f"the source or the target has no tokens: {beginning}")
        elif fits and max(length, len(target) + 1) <= config.batch_tokens:
            fitting.append(pair)
        else:
            left_out.append(f"{len(source)} and {len(target)} tokens exceed the limit: {beginning}")
    return fitting, left_out
