"""Task of preference tuning (DPO): prefer the better answer more than the checkpoint does."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxformer.artifacts.files import replacing
from jaxformer.artifacts.run import RunFolder
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sharding.parameters import to_host
from jaxformer.training import processes
from jaxformer.training.batch import WHOLE, OnScored, Share, noop
from jaxformer.training.config import PreferenceTraining
from jaxformer.training.data.examples import PREFERENCE
from jaxformer.training.data.packing import Examples
from jaxformer.training.data.preferences import PreferenceBatches, answer_batch, pair_batch
from jaxformer.training.preference import DirectPreference, answer_log_probs
from jaxformer.training.tasks.records import RecordTask
from jaxformer.training.tasks.task import Measure, Score


@dataclass(frozen=True)
class Preferences(RecordTask[PreferenceTraining]):
    """Task on pairs of answers. Examples 2i and 2i + 1 are the better and the worse answer.

    Attributes:
        reference: The log-probability of each example under the checkpoint, for each part of the
            data. `prepare` sets this field.
    """

    measure: ClassVar[Measure] = Measure("preference_accuracy", "preference accuracy", "pair")
    scoring_cost: ClassVar[float] = 1.0
    forms = (PREFERENCE,)
    reference: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def objective(self) -> DirectPreference:
        """DPO with the β of the config."""
        return DirectPreference(self.config.dpo_beta)

    @property
    def num_targets(self) -> int:
        """Number of held-out pairs."""
        return len(self.held_out) // 2

    def description(self) -> list[str]:
        """Returns lines of text about the size of the training and held-out parts."""
        return [
            f"{name}: {len(examples) // 2:,} pairs of answers, {len(examples.ids):,} tokens"
            for name, examples in (("training", self.train), ("held out", self.held_out))
        ]

    @property
    def part(self) -> float:
        """Fraction of the held-out pairs that every evaluation scores."""
        return min(1.0, self.config.evaluation_records / self.num_targets)

    @property
    def questions(self) -> Examples:
        """The better answers of the held-out pairs."""
        return self.held_out.take(range(0, len(self.held_out), 2))

    def prepare(self, folder: RunFolder, model: LanguageModel, params: Weights | None) -> Self:
        """Scores all answers with the checkpoint, once per run (see `FileTask.prepare`).

        Raises:
            ValueError: The run was interrupted before its answers were scored.
        """
        parts = {"train": self.train, "held_out": self.held_out}
        missing = [part for part in parts if not folder.reference_scores[part].exists()]
        if missing:
            if params is None:
                raise ValueError(
                    f"{folder.reference_scores[missing[0]]} is missing: the run was interrupted "
                    "before its answers were scored; delete the folder and start again"
                )
            # Every process must look for the files before process 0 writes them.
            processes.wait_for_all("look for scores of answers")
            for part in missing:
                scores = self._reference_scores(model, params, parts[part])
                if processes.is_first():
                    _save(folder.reference_scores[part], scores)
            processes.wait_for_all("score answers")
        return replace(
            self, reference={part: np.load(folder.reference_scores[part]) for part in parts}
        )

    def _reference_scores(
        self, model: LanguageModel, params: Weights, examples: Examples
    ) -> np.ndarray:
        """Returns the log-probability of each example."""
        size, scores = 2 * self.config.batch_size, []
        for start in range(0, len(examples), size):
            numbers = range(start, min(start + size, len(examples)))
            batch = answer_batch(examples, numbers, size, self.config.window)
            # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
            scores.append(_scorer(model)(params, batch)[: len(numbers)])
        return np.concatenate(list(map(to_host, scores)))

    def batches(self, share: Share = WHOLE) -> PreferenceBatches:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        config = self.config
        return PreferenceBatches(
            self.train,
            self.reference["train"],
            config.window,
            config.batch_size,
            config.seed,
            accumulate=config.gradient_accumulation_steps,
            share=share,
        )

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Scores the model on held-out pairs (see `Task.score`)."""
        total, config = self.num_targets, self.config
        number = total if whole else min(config.evaluation_records, total)
        places = np.linspace(0, total - 1, number).round().astype(int)
        sums = []
        for start in range(0, number, config.batch_size):
            pairs = places[start : start + config.batch_size]
            batch = pair_batch(
                self.held_out, self.reference["held_out"], pairs, config.batch_size, config.window
            )
            # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
            sums.append(_losses(model, self.objective)(variables["params"], batch))
            on_scored(start + len(pairs))
        losses, right = np.array(jax.device_get(sums), np.float64).sum(axis=0)
        return Score(losses / number, right / number, number)


def _save(path: Path, scores: np.ndarray) -> None:
    """Writes an array atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, scores)


@lru_cache(maxsize=2)
def _scorer(model: LanguageModel) -> Any:
    return jax.jit(lambda params, batch: answer_log_probs(model, params, batch))


@lru_cache(maxsize=2)
def _losses(model: LanguageModel, objective: DirectPreference) -> Any:
    @jax.jit
    def losses(params: Weights, batch: Any) -> Any:
        sums = objective.loss(model, params, batch, None)
        return sums.loss, sums.figures["preference_accuracy"]

    return losses
