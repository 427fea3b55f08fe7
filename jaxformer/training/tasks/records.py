"""Base class of the tasks that tune a checkpoint on records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from jaxtyping import PRNGKeyArray

from jaxformer.artifacts.chat.plain import PLAIN_TEMPLATE
from jaxformer.artifacts.files import json_text, read_text, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.artifacts.tokenizer_copies import with_chat_template
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.config import Inputs, RecordTraining
from jaxformer.training.data.examples import (
    Example,
    Text,
    find_records,
    has_messages,
    read_examples,
    repeat_by_weight,
    split_texts,
)
from jaxformer.training.data.packing import Examples
from jaxformer.training.data.tokens import base_tokenizer
from jaxformer.training.screen import Screen

# A sample contains the answers to this many held-out prompts.
SAMPLES = 5
# A sample shows only the last characters of a prompt, at most this many.
_SHOWN = 200


class _Fitted(NamedTuple):
    """Examples that fit into a sequence, and the numbers of records that were cut or dropped.

    Attributes:
        examples: The examples.
        cut: The number of records whose end was cut off.
        dropped: The number of records with an example that has no target within a sequence.
    """

    examples: list[Example]
    cut: int
    dropped: int


ConfigT = TypeVar("ConfigT", bound=RecordTraining)


@dataclass(frozen=True)
class RecordTask(Generic[ConfigT]):
    """Base class of the tasks on records.

    Attributes:
        config: The settings of the run.
        tokenizer: The tokenizer of the checkpoint.
        train: The training examples.
        held_out: The held-out examples.
    """

    forms: ClassVar[Sequence[str]]
    """The accepted forms of records."""
    config: ConfigT
    tokenizer: Tokenizer
    train: Examples
    held_out: Examples

    @property
    def baselines(self) -> dict[str, float]:
        """The dict is empty, because this task has no baselines."""
        return {}

    @classmethod
    def gather(cls, inputs: Inputs, config: ConfigT, screen: Screen) -> Inputs:
        """Checks that the inputs are files of records (see `FileTask.gather`)."""
        if inputs.source or inputs.target:
            raise ValueError("--source and --target are for models that train on pairs")
        if not find_records(inputs.text):
            raise ValueError(f"{inputs.text[0]} has no records")
        if len(config.record_weights) not in (0, len(inputs.text)):
            raise ValueError(
                f"--record-weights has {len(config.record_weights)} numbers, but there are "
                f"{len(inputs.text)} files or datasets; give one number for each"
            )
        _read_template(config)
        return inputs

    @classmethod
    def learns_all(cls, config: ConfigT) -> bool:
        """Returns whether the model learns all tokens, not only the answers."""
        return False

    @classmethod
    def write(cls, folder: RunFolder, config: ConfigT, gathered: Inputs, screen: Screen) -> None:
        """Encodes the records, and writes both parts of the examples (see `FileTask.write`)."""
        tokenizer = base_tokenizer(folder)
        if tokenizer is None:
            raise ValueError("records with prompts need a checkpoint to tune; add --init-from")
        tokenizer = _with_template(tokenizer, gathered, config, screen)
        tokenizer.save(folder.tokenizer)
        options = {
            "forms": cls.forms,
            "learn_all": cls.learns_all(config),
            "weights": config.record_weights,
        }
        texts: list[Text] = []
        with screen.count(0, "encoding", "records") as show:
            for text in read_examples(gathered.text, tokenizer, **options):
                texts.append(text)
                show(len(texts))
        folder.tokens.mkdir(parents=True, exist_ok=True)
        lines = []
        train, held_out = split_texts(texts, config.validation_fraction)
        train = repeat_by_weight(train, config.seed)
        for part, records in zip(folder.examples, (train, held_out), strict=True):
            name = part.replace("_", " ")
            fitted = _fit(records, config.window)
            if not fitted.examples:
                raise ValueError(
                    f"no record of the {name} part has an answer within {config.window} tokens; "
                    "increase --window-length"
                )
            for number, what in (
                (fitted.cut, "cut at the end"),
                (fitted.dropped, "left out, because their answers begin later"),
            ):
                if number:
                    line = f"{name}: {number:,} of {len(records):,} records exceed"
                    screen.say(f"{line} {config.window:,} tokens and were {what}")
            Examples.join(fitted.examples).save(folder.examples[part], tokenizer.fingerprint)
            lines.append(f"{name:9} {len(records) - fitted.dropped:9d}  records")
        write_whole(folder.documents, "\n".join(lines) + "\n")
        # The baselines are written last: if their file exists, all other files are complete.
        write_whole(folder.baselines, json_text({}))

    @classmethod
    def read(cls, folder: RunFolder, config: ConfigT) -> Self:
        """Reads the files that `write` wrote."""
        tokenizer = run_tokenizer(folder)
        parts = (
            Examples.load(folder.examples[part], tokenizer.fingerprint)
            for part in ("train", "held_out")
        )
        return cls(config, tokenizer, *parts)

    def prepare(self, folder: RunFolder, model: LanguageModel, params: Weights | None) -> Self:
        """Returns the task. Subclasses that need the initial parameters override this method."""
        return self

    @property
    def num_targets(self) -> int:
        """Number of tokens to learn in all held-out records."""
        return self.held_out.num_targets

    @property
    def questions(self) -> Examples:
        """The held-out examples whose prompts the samples answer."""
        return self.held_out

    def description(self) -> list[str]:
        """Returns lines of text about the size of the training and held-out parts."""
        return [
            f"{name}: {len(examples):,} records, {len(examples.ids):,} tokens, "
            f"{examples.num_targets:,} to learn"
            for name, examples in (("training", self.train), ("held out", self.held_out))
        ]

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns held-out prompts with the model's greedy answers and the true answers."""
        if not self.config.sample_tokens:
            return ""
        prompts, answers = [], []
        for example in self.questions.spread(SAMPLES):
            start = int(np.argmax(example.mask))
            if 0 < start < model.config.max_length:
                prompts.append(list(map(int, example.ids[:start])))
                answers.append(list(map(int, example.ids[start:])))
        if not prompts:
            return ""
        room = model.config.max_length - max(map(len, prompts))
        found = generate(
            model,
            variables,
            prompts,
            max_new_tokens=min(self.config.sample_tokens, room),
            sampler=Sampler(temperature=0.0),
            key=key,
            stop_tokens=self.tokenizer.stop_tokens,
        )
        decode, lines = self.tokenizer.decode, []
        for prompt, answer, ids, length in zip(
            prompts, answers, found.tokens.tolist(), found.lengths.tolist(), strict=True
        ):
            question = decode(prompt).strip()[-_SHOWN:]
            said, wanted = decode(ids[:length]).strip(), decode(answer).strip()
            lines.append(f"{question}\n  → {said}\n  = {wanted}")
        return "\n".join(lines)

    def example(self) -> list[str]:
        """Returns a command that answers a held-out prompt."""
        first = self.held_out[0]
        prompt = self.tokenizer.decode(map(int, first.ids[: int(np.argmax(first.mask))]))
        if prompt and prompt.isprintable():
            return ["generate", f"--prompt={prompt}"]
        return ["generate" if self.tokenizer.chat_templates is None else "chat"]


def _with_template(
    tokenizer: Tokenizer, inputs: Inputs, config: RecordTraining, screen: Screen
) -> Tokenizer:
    """Returns the tokenizer with the chat template that the records need."""
    if (given := _read_template(config)) is not None:
        return with_chat_template(tokenizer, given)
    if tokenizer.chat_templates is None and has_messages(inputs.text):
        screen.say("the checkpoint has no chat template: a plain one is used and saved")
        return with_chat_template(tokenizer, PLAIN_TEMPLATE)
    return tokenizer


def _read_template(config: RecordTraining) -> str | None:
    """Returns the content of --chat-template, or None.

    Raises:
        ValueError: The file cannot be read.
    """
    if config.chat_template is None:
        return None
    try:
        return read_text(Path(config.chat_template))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat-template {config.chat_template} cannot be read: {error}"
        ) from None


def _fit(texts: list[Text], length: int) -> _Fitted:
    """Cuts examples to `length` + 1 tokens: the inputs of a sequence and its last target.

    Drops records with an example that then has no target.
    """
    kept, cut, dropped = [], 0, 0
    for text in texts:
        short = [Example(x.ids[: length + 1], x.mask[: length + 1]) for x in text.examples]
        if not all(example.num_targets for example in short):
            dropped += 1
            continue
        cut += any(len(x.ids) > length + 1 for x in text.examples)
        kept += short
    return _Fitted(kept, cut, dropped)
