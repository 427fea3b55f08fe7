"""Task of causal models: predict each token of a text from the tokens before it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, Batch, OnScored, Share, noop
from jaxformer.training.config import TextTraining
from jaxformer.training.data.windows import EvaluationWindows, WindowBatches
from jaxformer.training.evaluate import evaluate_documents, half
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask


@dataclass(frozen=True)
class NextTokens(TextTask):
    """Task on windows of text; the targets are the inputs shifted by one."""

    measure: ClassVar[Measure] = Measure("bits_per_byte", "bits per byte")
    scoring_cost: ClassVar[float] = 0.5  # only the forward pass, and a token may be read twice

    @property
    def baselines(self) -> dict[str, float]:
        """Bits per byte of compressors on the held-out text."""
        return self.data.baselines

    @property
    def num_targets(self) -> int:
        """Number of targets in all held-out text."""
        return self.data.held_out.num_targets

    @cached_property
    def part(self) -> float:
        """Share of the held-out windows that every evaluation scores."""
        length = self.config.model.max_length
        rows = EvaluationWindows(self.data.held_out_documents, length, half(length))
        return min(1.0, self.config.evaluation_windows / len(rows))

    def batches(self, share: Share = WHOLE) -> "MicroBatches":
        """Returns the training batches from the beginning, or the share of one process."""
        return MicroBatches(self.data.train.ids, self.config, self.data.train.starts, share)

    def score(
        self,
        model: LanguageModel,
        variables: Variables,
        *,
        whole: bool,
        on_scored: OnScored = noop,
    ) -> Score:
        """Scores the model on held-out text (see `Task.score`)."""
        evaluation = evaluate_documents(
            model,
            variables,
            self.data.held_out_documents,
            self.data.held_out.num_bytes,
            windows=None if whole else self.config.evaluation_windows,
            batch_size=self.config.batch_size,
            on_scored=on_scored,
        )
        return Score(evaluation.loss, evaluation.bits_per_byte, evaluation.tokens)

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns text that the model generates without a prompt."""
        opening = self.tokenizer.opening
        room = min(self.config.sample_tokens, model.config.max_length - len(opening))
        if room < 1:
            return ""
        sampler, stop_tokens = Sampler(temperature=0.8, top_p=0.95), self.tokenizer.stop_tokens
        options = {"sampler": sampler, "key": key, "stop_tokens": stop_tokens}
        sample = generate(model, variables, [opening], max_new_tokens=room, **options)
        return self.tokenizer.decode(sample.tokens[0, : sample.lengths[0]].tolist())

    def example(self) -> list[str]:
        """Returns a command that continues the beginning of the held-out text."""
        text, longest = self.data.held_out_beginning, self.config.model.max_length
        words = first_words(text, lambda words: len(self.tokenizer.encode(words)) + 1 < longest)
        return ["generate", *[f"--prompt={words}"] * bool(words)]


class MicroBatches(Iterator[Batch[np.ndarray]]):
    """Windows of tokens, int32 [accumulate, batch, length].

    The batches have segments if `config.packing` is "documents".
    """

    def __init__(
        self, tokens: np.ndarray, config: TextTraining, starts: np.ndarray, share: Share = WHOLE
    ):
        """Prepares to read windows.

        Args:
            tokens: int [num_tokens].
            config: The settings of the run, with the number and the length of windows.
            starts: Indices in `tokens` where documents start.
            share: The rows of each micro-batch to read.
        """
        accumulate, batch_size, length = config.accumulate, config.batch_size, config.window
        self._shape = (accumulate, batch_size // share.count, length)
        self._packed = config.packing == "documents"
        rows, borders = share.rows(batch_size, accumulate), starts if self._packed else None
        self._windows = WindowBatches(
            tokens, length, accumulate * batch_size, config.seed, rows=rows, starts=borders
        )
        self.state, self.restore = self._windows.state, self._windows.restore

    def __next__(self) -> Batch[np.ndarray]:
        """Returns the next batch, with micro-batches along the first axis."""
        return jax.tree.map(lambda x: x.reshape(self._shape), next(self._windows))

    def places(self, number: int) -> np.ndarray:
        """Returns the indices in `tokens` of a batch: its inputs and, last, each final target.

        Args:
            number: The number of the batch.

        Returns:
            int [accumulate, batch, length + 1].
        """
        return self._windows.places(number).reshape(*self._shape[:-1], -1)

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the only shape of batch."""
        ids, weights = (jax.ShapeDtypeStruct(self._shape, x) for x in (np.int32, np.float32))
        return [Batch(ids, ids, weights, ids) if self._packed else Batch(ids, ids)]


def first_words(text: str, fits: Callable[[str], bool]) -> str:
    """Returns the beginning of a text's first line, of at most 20 characters.

    Args:
        text: The text.
        fits: Returns whether a beginning is short enough; if not, characters are removed.
    """
    words = "".join(takewhile(str.isprintable, text.lstrip()))
    if len(words) > 20:
        words = words[:20].rpartition(" ")[0].rstrip() or words[:20]
    while words and not fits(words):
        words = words[:-1]
    return words
