"""Task of supervised tuning: predict the completions or the assistant's turns of records."""

from dataclasses import dataclass
from typing import ClassVar

from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, OnScored, Share, noop
from jaxformer.training.config import TuningTraining
from jaxformer.training.data.examples import TUNING_FORMS
from jaxformer.training.data.packing import Examples, PackedBatches
from jaxformer.training.evaluate import evaluate
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.tasks.records import RecordTask
from jaxformer.training.tasks.task import Measure, Score


@dataclass(frozen=True)
class Tuning(RecordTask[TuningTraining]):
    """Task on records. The targets are completions or, in conversations, the assistant's turns."""

    measure: ClassVar[Measure] = Measure("token_accuracy", "token accuracy")
    scoring_cost: ClassVar[float] = 1.0
    forms = TUNING_FORMS

    @property
    def objective(self) -> CrossEntropy:
        """Cross-entropy of the tokens to learn."""
        return CrossEntropy(self.config.label_smoothing)

    @classmethod
    def learns_all(cls, config: TuningTraining) -> bool:
        """Returns whether the model learns all tokens, not only the answers."""
        return config.loss_on == "all"

    @property
    def part(self) -> float:
        """Fraction of the held-out records that every evaluation scores."""
        return min(1.0, self.config.evaluation_records / len(self.held_out))

    def batches(self, share: Share = WHOLE) -> PackedBatches:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        return self._batches(self.train, share)

    def _batches(self, examples: Examples, share: Share = WHOLE) -> PackedBatches:
        config = self.config
        return PackedBatches(
            examples,
            config.window,
            config.batch_size,
            config.seed,
            accumulate=config.gradient_accumulation_steps,
            packs=config.packing == "records",
            share=share,
        )

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Scores the model on held-out records (see `Task.score`)."""
        number = len(self.held_out) if whole else self.config.evaluation_records
        batches = self._batches(self.held_out.spread(number)).once()
        sums = evaluate(model, variables, batches, on_scored, correct=True)
        return Score(sums.loss / sums.targets, sums.correct / sums.targets, sums.targets)
