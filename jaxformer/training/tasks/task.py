"""What a kind of model learns from and is scored by."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import WHOLE, Batch, Share
from jaxformer.training.config import Inputs
from jaxformer.training.screen import Screen


class Measure(NamedTuple):
    """A task's figure beside the loss: what metrics.jsonl calls it, and a picture."""

    name: str
    label: str


class Score(NamedTuple):
    """loss: nats per target; measure: the task's figure; targets: how many were scored."""

    loss: float
    measure: float
    targets: int


class Batches(Protocol):
    """Batches for updates, without end; what comes is a function of data, config and seed alone."""

    def __next__(self) -> Batch:
        """Micro-batches along the first axis."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...

    def shapes(self) -> list[Batch]:
        """Every shape in which they come."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, for JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes where ``state`` was taken."""
        ...


class Task(Protocol):
    """A run's text, prepared: batches to learn from, a score, a sample."""

    measure: ClassVar[Measure]
    tokenizer: Tokenizer | Subwords
    baselines: dict[str, float]
    """what others reach by the measure, on all that is held out"""
    num_targets: int
    """in all that is held out"""

    @classmethod
    def gather(cls, inputs: Inputs, config, screen: Screen) -> Any:
        """What is at the inputs, read and accepted before anything is written.

        ValueError if there is nothing to learn from, or if it is of another kind.
        """
        ...

    @classmethod
    def write(cls, folder: RunFolder, config, gathered, screen: Screen) -> None:
        """Hold some of it out, train the tokenizer on the rest, unless the run began with one, and
        write both as tokens."""
        ...

    @classmethod
    def read(cls, folder: RunFolder, config) -> "Task":
        """What `write` wrote."""
        ...

    def description(self) -> list[str]:
        """What there is to learn from, in lines."""
        ...

    def batches(self, share: Share = WHOLE) -> Batches:
        """From the beginning, for one of several processes its share."""
        ...

    def score(
        self, model, variables, *, whole: bool, on_scored: Callable[[int], None] = ...
    ) -> Score:
        """How well the model does on what is held out: all of it, or a part, each time the same.

        on_scored: is told how many targets are scored so far.
        """
        ...

    def sample(self, model, variables, key) -> str:
        """Something of the model's own that a person can judge; "": none is wanted."""
        ...

    def example(self) -> list[str]:
        """The verb, and words after RUN, of a command that shows what the model has learnt."""
        ...
