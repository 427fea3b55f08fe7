"""Command line of `train`, whose flags and defaults depend on --model and --preset."""

import re
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import read_given, read_values, split
from jaxformer.cli.flags import IgnoredOptions, Switch, field_values, list_flags, positional
from jaxformer.cli.help import asks_for_help
from jaxformer.models.config import KINDS
from jaxformer.models.config.needs import Needs, Spelling, any_of, is_given, is_one_of, spell_flag
from jaxformer.training.config import (
    RESUMABLE,
    Inputs,
    PairTraining,
    Processes,
    RecordTraining,
    TrainingConfig,
    differences,
)
from jaxformer.training.data.documents import HUB
from jaxformer.training.data.records import has_records
from jaxformer.training.presets import kinds_with_preset, training_preset, usual_preset

# The flags that --help lists. --help-all lists all flags.
MAIN_FLAGS = ("--model", "--preset", "--init-from", "--out", "--resume", "--steps", "--max-minutes")
_TUNING_FLAGS = ("--loss-on", "--dpo-beta", "--chat-template", "--lora-rank")
MAIN_FLAGS += ("--learning-rate", "--num-layers", "--embed-dim")


@dataclass(frozen=True)
class TrainArguments:
    """Train a model on text or on pairs of sentences, and write everything to a run folder.

    Without TEXT, the model is trained on the source code of the Python standard library. The models
    encoder-decoder and recurrent-encoder-decoder are trained on pairs of lines: --source and
    --target. With --init-from, TEXT may be a file of records with prompts and answers, messages, or
    a chosen and a rejected answer.
    """

    needs: ClassVar[Needs] = {
        "target": (is_given("source"),),
        "text_field": (has_records("text"),),
        "trust_code": (any_of(is_one_of("resume", True), is_given("init_from")),),
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
    init_from: str | None = None
    """checkpoint to start from, with its tokenizer: a run folder, a folder that jf.save wrote, a
    folder in Hugging Face format or a hub id; default: fresh parameters"""
    # pyrefly: ignore[invalid-literal] (the choices are computed)
    kind: Annotated[Literal[tuple(KINDS)], Spelling("model")] = "decoder"
    """kind of model"""
    preset: str = "stdlib"
    """named settings, such as stdlib or tiny, which other flags override; model sizes without a
    flag follow from the flags that are set (--embed-dim also scales the heads and the feed-forward
    width); with --init-from, only the training settings of the preset apply; with --init-from and
    without --preset, the learning rate is 0.0001"""
    ignore_generation_config: IgnoredOptions = ()
    """with --init-from: option of the checkpoint's generation_config.json to ignore, for example
    because it is not implemented; may be repeated"""
    out: Path | None = None
    """run folder; default: runs/NAME, where NAME comes from the text and the kind of model"""
    resume: Switch = False
    """continue the run in --out; without --out, continue the most recent unfinished run below runs/
    (with --model, the most recent run of this architecture)"""
    trust_code: Switch = False
    """with --resume or --init-from: import the user-defined functions of the run or checkpoint; use
    this only for a model that you trust, because importing a module runs its code"""
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        """Checks that --out is set if several processes train together."""
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
    """Returns {key: value} for the arguments that the command line of `train` sets.

    Args:
        argv: The command-line arguments after `train`. --help and --help-all print the flags and
            exit.
        default: The default arguments. Their model determines which flags exist.

    Raises:
        ValueError: The command line cannot be parsed or a flag belongs to another model.
    """
    flags = list_flags(TrainArguments, default)
    for name in () if asks_for_help(argv) else split(flags, argv).unknown:
        if kinds := [kind for kind in KINDS if name.replace("_", "-") in _flag_names(kind)]:
            raise ValueError(
                f"{name} has no effect here; it needs --model {' or '.join(kinds)} (--model is "
                f"{default.kind})"
            )
    sides = ("--source", "--target") if isinstance(default.training, PairTraining) else ()
    shown = (*sides, *_TUNING_FLAGS) if isinstance(default.training, RecordTraining) else sides
    return read_given(TrainArguments, "train", argv, default, (*shown, *MAIN_FLAGS))


def _flag_names(kind: str) -> set[str]:
    """Returns the spellings of all flags of `train` for one architecture."""
    default = TrainArguments(training_preset(usual_preset(kind), kind))
    return {name for flag in list_flags(TrainArguments, default) for name in flag.names}


def check_unchanged(folder: RunFolder, old: TrainingConfig, arguments: TrainArguments) -> None:
    """Checks that a resumed run has its old inputs and settings, except for `RESUMABLE` settings.

    Args:
        folder: The run folder.
        old: The settings in the run folder.
        arguments: The arguments of the command that resumes the run.

    Raises:
        ValueError: a field outside `RESUMABLE` changes, inputs are given, or --steps is below the
            current step of the run.
    """
    for name, value in (*arguments.inputs._asdict().items(), ("--init-from", arguments.init_from)):
        if value:
            raise ValueError(
                f"{name} has no effect with --resume: the run in {folder.path} keeps the inputs "
                "that it started with"
            )
    changed = differences(old, arguments.training)
    refused = {name: pair for name, pair in changed.items() if name not in RESUMABLE}
    for name, (before, after) in refused.items():
        flags = list_flags(type(arguments.training), arguments.training)
        accepted = ", ".join(flag.name for flag in flags if flag.field in RESUMABLE)
        raise ValueError(
            f"{spell_flag(name)} is {after}, but the run in {folder.path} was started with "
            f"{before}; when resuming only {accepted} may change"
        )
    if "steps" in changed and arguments.training.steps is not None:
        from jaxformer.artifacts.checkpoint import Checkpoints

        last = max(Checkpoints(folder.checkpoints).steps(), default=0)
        if arguments.training.steps < last:
            raise ValueError(
                f"--steps is {arguments.training.steps}, but the run in {folder.path} is at "
                f"step {last}; --steps must be at least {last}"
            )


class Selection(NamedTuple):
    """The arguments that determine the flags and their defaults. A missing argument is None."""

    model: str | None
    named_preset: str | None
    init_from: str | None
    out: Path | None
    resume: bool | None
    trust_code: bool | None

    @property
    def kind(self) -> str:
        """The architecture: --model, or the first architecture of the preset."""
        return self.model or next(iter(kinds_with_preset(self.named_preset or "stdlib")), "decoder")

    @property
    def preset(self) -> str:
        """The name of the preset: --preset, or the first preset for the architecture."""
        return self.named_preset or usual_preset(self.kind)


def read_selection(argv: list[str]) -> Selection:
    """Reads --model and --preset, which determine the remaining flags of `train`.

    Args:
        argv: The command-line arguments after `train`.

    Raises:
        ValueError: a value is missing, or --model or --preset has an unknown value.
    """
    names = ("model", "preset", "init_from", "out", "resume", "trust_code")
    flags = [flag for flag in list_flags(TrainArguments) if flag.key in names]
    selection = Selection(*map(read_values(flags, split(flags, argv).given).get, names))
    training_preset(selection.preset, selection.kind)  # Raises for an unknown preset.
    return selection


@contextmanager
def attributed(training: TrainingConfig, given: Collection[str], owner: str) -> Generator[None]:
    """Adds the origin of a value to error messages about flags that the user did not set.

    For example, "window_length is 128" becomes "the preset's window_length is 128".

    Args:
        training: The settings before the command line changed them.
        given: The keys of the arguments that the user set on the command line.
        owner: The words to insert before the name of a setting, such as "the preset's".

    Yields:
        None. A ValueError in the `with` block is raised again with the changed message.
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
