"""Interfaces of tasks for the training loop and the command line."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from jaxtyping import PRNGKeyArray

from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, AnyBatch, OnScored, Share
from jaxformer.training.config import Inputs, TrainingConfig
from jaxformer.training.objectives import Objective
from jaxformer.training.screen import Screen

Config = TypeVar("Config", bound=TrainingConfig, contravariant=True)


class Measure(NamedTuple):
    """The measure of a task, reported in addition to the loss.

    Attributes:
        name: The measure's name in metrics.jsonl.
        label: The measure's label in plots and on the screen.
        target: The word for one target on the screen and in plots, such as "token" or "pair".
    """

    name: str
    label: str
    target: str = "token"


class Score(NamedTuple):
    """Scores of a model on held-out data.

    Attributes:
        loss: Mean loss in nats per target.
        measure: The value of the task's measure (see `Measure`).
        targets: The number of scored targets.
    """

    loss: float
    measure: float
    targets: int


class Batches(Iterator[AnyBatch], Protocol[AnyBatch]):
    """Endless iterator over the batches of updates, with micro-batches along the first axis.

    The batches depend only on the data, the config and the seed.
    """

    def shapes(self) -> list[AnyBatch]:
        """Returns the shape of every batch that the iterator can yield."""

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position as JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the iterator to the position in `state`."""


class Task(Protocol):
    """Interface for the training loop: objective, training batches, evaluation and samples."""

    measure: ClassVar[Measure | None]
    """Measure to report in addition to the loss; None to report only the loss."""
    scoring_cost: ClassVar[float]
    """Estimated time to score a target, relative to the time to train on a target."""

    @property
    def objective(self) -> Objective:
        """The quantity that training minimizes."""

    @property
    def baselines(self) -> dict[str, float]:
        """Reference values of the measure on all held-out data, by name."""

    @property
    def num_targets(self) -> int:
        """Number of targets in all held-out data, or 0 without held-out data."""

    @property
    def part(self) -> float:
        """Fraction of the held-out data that every evaluation scores."""

    def batches(self, share: Share = WHOLE) -> Batches:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = ...
    ) -> Score:
        """Scores the model on held-out data.

        Args:
            model: The model.
            variables: The model's variables.
            whole: Whether to score all held-out data, instead of a fixed part of the data.
            on_scored: Called with the number of targets scored so far.
        """

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns a sample of the model's output, or an empty string if no sample is written."""


class FileTask(Task, Protocol[Config]):
    """Task on data in files. `jaxformer train` prepares the data in the run folder."""

    measure: ClassVar[Measure]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data."""

    @classmethod
    def gather(cls, inputs: Inputs, config: Config, screen: Screen) -> Any:
        """Reads and checks the inputs before any file is written.

        Args:
            inputs: The paths to read.
            config: The settings of the run.
            screen: Shows progress.

        Returns:
            The data in the form that `write` accepts.

        Raises:
            ValueError: The inputs contain too little data, or data that the task does not support.
        """

    @classmethod
    def write(cls, folder: RunFolder, config: Config, gathered: Any, screen: Screen) -> None:
        """Splits the data into training and held-out parts, and writes the tokens of both parts.

        Trains a tokenizer on the training part, unless the run folder already contains a tokenizer.

        Args:
            folder: The run folder.
            config: The settings of the run.
            gathered: The result of `gather`.
            screen: Shows progress.
        """

    @classmethod
    def read(cls, folder: RunFolder, config: Config) -> Self:
        """Reads the files that `write` wrote."""

    def prepare(self, folder: RunFolder, model: LanguageModel, params: Weights | None) -> Self:
        """Returns the task with all values that it computes from the initial parameters.

        Args:
            folder: The run folder.
            model: The model.
            params: The parameters of the checkpoint. None for a new model, and for a resumed run,
                which has been prepared before.
        """

    def description(self) -> list[str]:
        """Returns lines of text about the size of each part of the data."""

    def example(self) -> list[str]:
        """Returns an example command: the subcommand, and the arguments after the run folder."""
