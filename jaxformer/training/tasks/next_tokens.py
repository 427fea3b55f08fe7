"""Task of causal models: predict each token of a text from the tokens before it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import ClassVar

from jaxtyping import PRNGKeyArray

from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, OnScored, Share, noop
from jaxformer.training.data.windows import EvaluationWindows, WindowBatches
from jaxformer.training.evaluate import evaluate_documents, half
from jaxformer.training.tasks.task import Measure, Score
from jaxformer.training.tasks.text import TextTask


@dataclass(frozen=True)
class NextTokens(TextTask):
    """Task on windows of text. The targets are the inputs shifted by one position."""

    measure: ClassVar[Measure] = Measure("bits_per_byte", "bits per byte")
    # Scoring needs no backward pass, but the windows overlap, so some tokens are read repeatedly.
    scoring_cost: ClassVar[float] = 0.5

    @property
    def baselines(self) -> dict[str, float]:
        """Bits per byte of gzip and xz on the held-out text."""
        return self.data.baselines

    @property
    def num_targets(self) -> int:
        """Number of targets in all held-out text."""
        return self.data.held_out.num_targets

    @cached_property
    def part(self) -> float:
        """Fraction of the held-out windows that every evaluation scores."""
        length = self.config.model.max_length
        windows = EvaluationWindows(self.data.held_out_documents, length, half(length))
        return min(1.0, self.config.evaluation_windows / len(windows))

    def batches(self, share: Share = WHOLE) -> WindowBatches:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        config, stream = self.config, self.data.train
        starts = stream.starts if config.packing == "documents" else None
        options = {
            "accumulate": config.gradient_accumulation_steps,
            "starts": starts,
            "share": share,
        }
        return WindowBatches(stream.ids, config.window, config.batch_size, config.seed, **options)

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
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


def first_words(text: str, fits: Callable[[str], bool]) -> str:
    """Returns up to 20 characters from the beginning of a text's first line.

    Args:
        text: The text.
        fits: Returns whether a text is short enough. Characters are removed until `fits`
            returns True.
    """
    words = "".join(takewhile(str.isprintable, text.lstrip()))
    if len(words) > 20:
        words = words[:20].rpartition(" ")[0].rstrip() or words[:20]
    while words and not fits(words):
        words = words[:-1]
    return words
