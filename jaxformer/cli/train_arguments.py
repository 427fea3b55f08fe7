"""Command line of `train`: the model kind and preset determine its flags and their defaults."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import read_given, split, values_of
from jaxformer.cli.flags import IgnoredOptions, Spelling, Switch, field_values, flags_of, positional
from jaxformer.cli.help import asks_for_help
from jaxformer.models.config import KINDS
from jaxformer.models.config.needs import Needs, flag_of, is_given
from jaxformer.training.config import (
    RESUMABLE,
    Inputs,
    PairTraining,
    Processes,
    TrainingConfig,
    differences,
)
from jaxformer.training.data.documents import HUB
from jaxformer.training.data.records import has_records
from jaxformer.training.presets import kinds_of, training_preset, usual_preset

# The flags that --help lists. --help-all lists all flags.
MAIN_FLAGS = ("--model", "--preset", "--from", "--out", "--resume", "--steps", "--minutes")
MAIN_FLAGS += ("--learning-rate", "--num-layers", "--embed-dim")


@dataclass(frozen=True)
class TrainArguments:
    """Train a model on text or on pairs of sentences, and write everything to a run folder.

    Without TEXT, it trains on the source code of the Python standard library. The kinds
    encoder-decoder and recurrent-encoder-decoder train on pairs of lines: --source and --target.
    """

    needs: ClassVar[Needs] = {
        "target": (is_given("source"),),
        "text_field": (has_records("text"),),
    }

    training: TrainingConfig = field(default_factory=lambda: training_preset("stdlib", "decoder"))
    text: Annotated[tuple[Path, ...], positional("TEXT…")] = ()
    """files or folders of UTF-8 text; .jsonl and .parquet files hold one text per record; .gz and
    .zst files are decompressed; hf:OWNER/NAME is a dataset of the Hugging Face hub"""
    source: Path | None = None
    """file with one source sentence per line, or a .tsv or .jsonl file with both sides; may be
    .gz"""
    target: Path | None = None
    """file with the translation of each line of --source"""
    base: Annotated[str | None, Spelling("from")] = None
    """checkpoint to start from, with its tokenizer: a run folder, a saved folder, a folder in
    Hugging Face format or a hub id; None: fresh parameters"""
    # pyrefly: ignore[invalid-literal] (the choices are computed)
    kind: Annotated[Literal[tuple(KINDS)], Spelling("model")] = "decoder"
    """kind of model"""
    preset: str = "stdlib"
    """named settings, such as stdlib or tiny, which other flags override; sizes of the model that
    no flag sets follow from those that flags set (--embed-dim also scales the heads and the
    feed-forward width); with --from, only its training settings apply, and without --preset the
    learning rate is 0.0001"""
    ignore_generation_config: IgnoredOptions = ()
    """with --from: option of the checkpoint's generation_config.json to leave out, such as one that
    is not implemented; may be repeated"""
    out: Path | None = None
    """run folder; None: runs/NAME, where NAME comes from the text and the kind of model"""
    resume: Switch = False
    """continue the run in --out; without --out, the unfinished run below runs/ that was trained
    last (of the kind --model, if given)"""
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        """Checks that several processes do not each choose a run folder."""
        if self.processes.coordinator and self.out is None:
            raise ValueError(
                "--out is missing; with --coordinator all processes need the same folder"
            )

    @property
    def inputs(self) -> Inputs:
        """The inputs with absolute paths, so that the run can be resumed from any folder."""
        text = tuple(x if str(x).startswith(HUB) else x.absolute() for x in self.text)
        source, target = (x and x.absolute() for x in (self.source, self.target))
        return Inputs(text, source, target)


def read_train(argv: list[str], default: TrainArguments) -> dict[str, Any]:
    """Returns the values of the arguments that the command line gives, by key.

    Args:
        argv: The words after `train`. --help and --help-all print the flags and exit.
        default: The arguments without the command line. Their kind of model determines the flags.

    Raises:
        ValueError: A flag belongs to other kinds of model, or the command line cannot be parsed.
    """
    flags = flags_of(TrainArguments, default)
    for name in () if asks_for_help(argv) else split(flags, argv).unknown:
        if kinds := [kind for kind in KINDS if name.replace("_", "-") in _names_of(kind)]:
            raise ValueError(
                f"{name} has no effect here; it needs --model {' or '.join(kinds)} (--model is "
                f"{default.kind})"
            )
    sides = ("--source", "--target") if isinstance(default.training, PairTraining) else ()
    return read_given(TrainArguments, "train", argv, default, (*sides, *MAIN_FLAGS))


def _names_of(kind: str) -> set[str]:
    """Returns the spellings of all flags for a kind of model."""
    default = TrainArguments(training_preset(usual_preset(kind), kind))
    return {name for flag in flags_of(TrainArguments, default) for name in flag.names}


def check_unchanged(folder: RunFolder, old: TrainingConfig, arguments: TrainArguments) -> None:
    """Checks the changes to a resumed run: its inputs and computed values must stay the same.

    Args:
        folder: The run folder.
        old: The settings in the run folder.
        arguments: The new arguments.

    Raises:
        ValueError: A field outside `RESUMABLE` changes, the arguments name inputs, or --steps is
            below the step that the run has reached.
    """
    for name, value in (*arguments.inputs._asdict().items(), ("--from", arguments.base)):
        if value:
            raise ValueError(f"{name} was given, but {folder.path} resumes with its first inputs")
    changed = differences(old, arguments.training)
    refused = {name: pair for name, pair in changed.items() if name not in RESUMABLE}
    for name, (before, after) in refused.items():
        accepted = ", ".join(map(flag_of, RESUMABLE))
        raise ValueError(
            f"{flag_of(name)} is {after}, but the run in {folder.path} was started with "
            f"{before}; when resuming only {accepted} may change"
        )
    if "steps" in changed and arguments.training.steps is not None:
        from jaxformer.artifacts.checkpoint import Checkpoints

        last = max(Checkpoints(folder.checkpoints).steps(), default=0)
        if arguments.training.steps < last:
            raise ValueError(
                f"--steps is {arguments.training.steps}, but the run in {folder.path} is at {last}"
                "; give at least that many"
            )


class Selection(NamedTuple):
    """The arguments that determine the flags and their defaults; None if they are not given."""

    model: str | None
    named_preset: str | None
    base: str | None
    out: Path | None
    resume: bool | None

    @property
    def kind(self) -> str:
        """The kind of model: that of --model, otherwise the first kind of the preset."""
        return self.model or next(iter(kinds_of(self.named_preset or "stdlib")), "decoder")

    @property
    def preset(self) -> str:
        """The preset: that of --preset, otherwise the first one for the kind."""
        return self.named_preset or usual_preset(self.kind)


def read_selection(argv: list[str]) -> Selection:
    """Returns the arguments that `train` needs before it can build its flags.

    Args:
        argv: The words after `train`.

    Raises:
        ValueError: A flag lacks its value, or --model or --preset has an unknown value.
    """
    names = ("model", "preset", "from", "out", "resume")
    flags = [flag for flag in flags_of(TrainArguments) if flag.key in names]
    selection = Selection(*map(values_of(flags, split(flags, argv).given).get, names))
    training_preset(selection.preset, selection.kind)  # raises ValueError for an unknown preset
    return selection


@contextmanager
def attributed(training: TrainingConfig, given: Collection[str], owner: str) -> Iterator[None]:
    """Adds the origin of a value to error messages about fields that the command line did not set.

    For example, "window_length is 128" becomes "the preset's window_length is 128".

    Args:
        training: The settings before the command line changed them.
        given: The keys of the arguments that the command line gives.
        owner: The words to add, such as "the preset's".

    Yields:
        None, for the `with` block whose errors are changed.
    """
    try:
        yield
    except ValueError as error:
        others = field_values(training).keys() - set(given)
        names = "|".join(sorted(map(re.escape, others), key=len, reverse=True))
        pattern = rf"(?<![\w-])(?<!'s )({names})(?= is -?[\d'\"NTF]| \(-?\d)"
        message = re.sub(pattern, rf"{owner} \1", str(error))
        if message == str(error):
            raise
        raise ValueError(message) from error
