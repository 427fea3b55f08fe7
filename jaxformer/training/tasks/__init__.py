"""Tasks: the data, batches and scores of each kind of run, behind one interface for the loop."""

from jaxformer.training.config import HiddenTraining, PairTraining, TextTraining, TrainingConfig
from jaxformer.training.tasks.task import FileTask


def task_of(config: TrainingConfig) -> type[FileTask]:
    """Returns the class of tasks for a config."""
    from jaxformer.training.tasks.hidden_tokens import HiddenTokens
    from jaxformer.training.tasks.next_tokens import NextTokens
    from jaxformer.training.tasks.pairs import Pairs

    tasks: dict[type[TrainingConfig], type[FileTask]] = {
        TextTraining: NextTokens,
        HiddenTraining: HiddenTokens,
        PairTraining: Pairs,
    }
    return tasks[type(config)]
