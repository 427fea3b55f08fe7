"""Interfaces of the tasks: what the training loop needs, and what the command line needs."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from jaxtyping import PRNGKeyArray

from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import WHOLE, AnyBatch, OnScored, Share
from jaxformer.training.config import Inputs, TrainingConfig
from jaxformer.training.objectives import Objective
from jaxformer.training.screen import Screen

Config = TypeVar("Config", bound=TrainingConfig, contravariant=True)


class Measure(NamedTuple):
    """The figure of a task, in addition to the loss.

    Attributes:
        name: Its name in metrics.jsonl.
        label: Its label in pictures and on the screen.
    """

    name: str
    label: str


class Score(NamedTuple):
    """Score of a model on held-out data.

    Attributes:
        loss: Nats per target.
        measure: The task's figure (see `Measure`).
        targets: The number of scored targets.
    """

    loss: float
    measure: float
    targets: int


class Batches(Iterator[AnyBatch], Protocol[AnyBatch]):
    """Endless iterator over the batches of updates, with micro-batches along the first axis.

    The batches depend on the data, the config and the seed only.
    """

    def shapes(self) -> list[AnyBatch]:
        """Returns every shape of batch that the iterator yields."""

    def state(self) -> dict[str, Any]:
        """Returns the position of the iterator, for JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in `state`."""


class Task(Protocol):
    """What the training loop needs: an objective, training batches, a score and a sample."""

    measure: ClassVar[Measure | None]
    """figure of a score in addition to the loss; None: the loss alone"""
    scoring_cost: ClassVar[float]
    """guess of the time of scoring a target, in times of training on one"""

    @property
    def objective(self) -> Objective:
        """What an update reduces."""

    @property
    def baselines(self) -> dict[str, float]:
        """Values of the measure on all held-out data to compare with, by name."""

    @property
    def num_targets(self) -> int:
        """Number of targets in all held-out data; 0: there are no held-out data to score."""

    @property
    def part(self) -> float:
        """Share of the held-out data that every evaluation scores."""

    def batches(self, share: Share = WHOLE) -> Batches:
        """Returns the training batches from the beginning, or the share of one process."""

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = ...
    ) -> Score:
        """Scores the model on held-out data.

        Args:
            model: The model.
            variables: Its parameters.
            whole: Whether to score all held-out data; if not, a fixed part of it is scored.
            on_scored: Called with the number of targets scored so far.
        """

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns output of the model for a person to judge; "" if the config wants no sample."""


class FileTask(Task, Protocol[Config]):
    """Task on files that a user names: `jaxformer train` prepares their data in the run folder."""

    measure: ClassVar[Measure]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data."""

    @classmethod
    def gather(cls, inputs: Inputs, config: Config, screen: Screen) -> Any:
        """Reads and checks the inputs, before any file is written.

        Args:
            inputs: The paths to read.
            config: The settings of the run.
            screen: Shows the progress.

        Returns:
            The data, in a form that `write` accepts.

        Raises:
            ValueError: The inputs hold too little data, or data of another kind of task.
        """

    @classmethod
    def write(cls, folder: RunFolder, config: Config, gathered: Any, screen: Screen) -> None:
        """Splits the data into training and held-out parts and writes the tokens of both.

        It trains a tokenizer on the training part, unless the run began with one.

        Args:
            folder: The folder of the run.
            config: The settings of the run.
            gathered: The result of `gather`.
            screen: Shows the progress.
        """

    @classmethod
    def read(cls, folder: RunFolder, config: Config) -> Self:
        """Reads the files of `write`."""

    def description(self) -> list[str]:
        """Returns lines of text about the size of each part of the data."""

    def example(self) -> list[str]:
        """Returns a command that uses the trained model: its verb and the words after RUN."""
