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

    def batches(self, share: Share = WHOLE) -> WindowBatches:
        """Returns the training batches from the beginning, or the share of one process."""
        config, stream = self.config, self.data.train
        starts = stream.starts if config.packing == "documents" else None
        how = {"accumulate": config.accumulate, "starts": starts, "share": share}
        return WindowBatches(stream.ids, config.window, config.batch_size, config.seed, **how)

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
