"""Tasks: what a kind of model learns from. One training loop knows nothing more of a model."""

from jaxformer.training.config import HiddenTraining, PairTraining, TextTraining, TrainingConfig


def task_of(config: TrainingConfig):
    """The `Task` of a run."""
    from jaxformer.training.tasks.hidden_tokens import HiddenTokens
    from jaxformer.training.tasks.next_tokens import NextTokens
    from jaxformer.training.tasks.pairs import Pairs

    tasks = {HiddenTraining: HiddenTokens, TextTraining: NextTokens, PairTraining: Pairs}
    return tasks[type(config)]
