"""Base class of the tasks that train on text."""

from dataclasses import dataclass
from typing import Self

from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.config import Inputs, TextTraining
from jaxformer.training.data import prepare
from jaxformer.training.data.corpus import Documents
from jaxformer.training.data.prepare import Prepared
from jaxformer.training.objectives import CrossEntropy
from jaxformer.training.screen import Screen


@dataclass(frozen=True)
class TextTask:
    """Task on a tokenised text with a held-out part.

    Attributes:
        config: The settings of the run.
        data: The tokens of both parts.
    """

    config: TextTraining
    data: Prepared

    @classmethod
    def gather(
        cls, inputs: Inputs, config: TextTraining, screen: Screen
    ) -> tuple[Documents, list[str]]:
        """Reads and checks the text (see `Task.gather`)."""
        if inputs.source or inputs.target:
            raise ValueError(
                "--source and --target are for pairs, but this kind of model trains on text; give "
                "TEXT instead"
            )
        return prepare.gather(inputs, config, screen)

    @classmethod
    def write(
        cls,
        folder: RunFolder,
        config: TextTraining,
        gathered: tuple[Documents, list[str]],
        screen: Screen,
    ) -> None:
        """Writes the tokens of both parts (see `Task.write`)."""
        prepare.write_data(folder, config, *gathered, screen)

    @classmethod
    def read(cls, folder: RunFolder, config: TextTraining) -> Self:
        """Reads the files of `write`."""
        return cls(config, prepare.read_data(folder))

    @property
    def objective(self) -> CrossEntropy:
        """What an update reduces."""
        return CrossEntropy(self.config.label_smoothing)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text."""
        return self.data.tokenizer

    def description(self) -> list[str]:
        """Returns lines of text about the size of each part."""
        return self.data.description()
