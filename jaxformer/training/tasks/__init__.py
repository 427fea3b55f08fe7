"""Tasks: the data, batches and evaluation of each kind of run, with a common interface."""

from jaxformer.training.config import (
    MaskedTokensTraining,
    PairTraining,
    PreferenceTraining,
    TextTraining,
    TrainingConfig,
    TuningTraining,
)
from jaxformer.training.tasks.task import FileTask


def task_class(config: TrainingConfig) -> type[FileTask]:
    """Returns the task class for a config."""
    from jaxformer.training.tasks.masked_tokens import MaskedTokens
    from jaxformer.training.tasks.next_tokens import NextTokens
    from jaxformer.training.tasks.pairs import Pairs
    from jaxformer.training.tasks.preferences import Preferences
    from jaxformer.training.tasks.tuning import Tuning

    tasks: dict[type[TrainingConfig], type[FileTask]] = {
        TextTraining: NextTokens,
        MaskedTokensTraining: MaskedTokens,
        PairTraining: Pairs,
        TuningTraining: Tuning,
        PreferenceTraining: Preferences,
    }
    return tasks[type(config)]
