"""Tasks: the data, batches and scores of each kind of run, behind one interface for the loop."""

from jaxformer.training.config import HiddenTraining, PairTraining, TextTraining, TrainingConfig


def task_of(config: TrainingConfig):
    """Returns the class that implements `Task` for a config."""
    from jaxformer.training.tasks.hidden_tokens import HiddenTokens
    from jaxformer.training.tasks.next_tokens import NextTokens
    from jaxformer.training.tasks.pairs import Pairs

    tasks = {HiddenTraining: HiddenTokens, TextTraining: NextTokens, PairTraining: Pairs}
    return tasks[type(config)]
