"""What tasks have in common that learn from text."""

from dataclasses import dataclass

from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.config import Inputs, TextTraining
from jaxformer.training.data import prepare
from jaxformer.training.data.prepare import Prepared
from jaxformer.training.screen import Screen


@dataclass(frozen=True)
class TextTask:
    """A text in tokens, some of it held out."""

    config: TextTraining
    data: Prepared

    @classmethod
    def gather(cls, inputs: Inputs, config: TextTraining, screen: Screen):
        if inputs.source or inputs.target:
            raise ValueError(
                "--source and --target were given, but this kind of model learns from TEXT"
            )
        return prepare.gather(inputs, config, screen)

    @classmethod
    def write(cls, folder, config: TextTraining, gathered, screen: Screen) -> None:
        prepare.write_data(folder, config, *gathered, screen)

    @classmethod
    def read(cls, folder, config: TextTraining) -> "TextTask":
        return cls(config, prepare.read_data(folder))

    @property
    def tokenizer(self) -> Tokenizer | Subwords:
        return self.data.tokenizer

    def description(self) -> list[str]:
        return self.data.description()
