"""Command line of `train`: the model kind and preset determine its flags and their defaults."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
)

import tyro

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import UsageError, parse, read_mesh
from jaxformer.cli.unread import flags_in
from jaxformer.models.config import KINDS
from jaxformer.models.config.check import type_hints
from jaxformer.models.config.needs import Given, Needs
from jaxformer.training.config import RESUMABLE, Inputs, PairTraining, TrainingConfig, differences
from jaxformer.training.data.documents import HUB
from jaxformer.training.data.records import HasRecords
from jaxformer.training.mesh_sizes import Mesh
from jaxformer.training.presets import TRAININGS, kinds_of, training_preset, usual_preset
from jaxformer.training.processes import Processes

# The flags that --help lists. --help-all lists all flags.
MAIN_FLAGS = ("--model", "--preset", "--from", "--out", "--resume", "--steps", "--minutes")
MAIN_FLAGS += ("--learning-rate", "--num-layers", "--embed-dim")

# Names of options, one for each --ignore-generation-config.
IgnoredOptions = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")
]
Training = TypeVar("Training")


@dataclass(frozen=True)
class TrainArguments(Generic[Training]):
    """Train a model on text or on pairs of sentences, and write everything to a run folder.

    Without TEXT, it trains on the source code of the Python standard library. The kinds
    encoder-decoder and recurrent-encoder-decoder train on pairs of lines: --source and --target.
    """

    needs: ClassVar[Needs] = {
        "target": (Given("source"),),
        "text_field": (HasRecords("text"),),
    }

    training: Training
    text: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT…")] = ()
    """files or folders of UTF-8 text; .jsonl and .parquet files hold one text per record; .gz and
    .zst files are decompressed; hf:OWNER/NAME is a dataset of the Hugging Face hub"""
    source: Path | None = None
    """file with one source sentence per line, or a .tsv or .jsonl file with both sides; may be
    .gz"""
    target: Path | None = None
    """file with the translation of each line of --source"""
    base: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """checkpoint to start from, with its tokenizer: a run folder, a saved folder, a folder in
    Hugging Face format or a hub id; None: fresh parameters"""
    # pyrefly: ignore[invalid-literal] (the choices are computed)
    kind: Annotated[Literal[tuple(KINDS)], tyro.conf.arg(name="model")] = "decoder"
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
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """continue the run in --out; without --out, the unfinished run below runs/ that was trained
    last (of the kind --model, if given)"""
    processes: Processes = field(default_factory=Processes)

    @property
    def inputs(self) -> Inputs:
        """The inputs with absolute paths, so that the run can be resumed from any folder."""
        text = tuple(x if str(x).startswith(HUB) else x.absolute() for x in self.text)
        source, target = (x and x.absolute() for x in (self.source, self.target))
        return Inputs(text, source, target)


def parse_train(kind: str, argv: list[str], default: TrainArguments) -> TrainArguments:
    """Returns the arguments; their flags are those of that kind of model and of its training."""
    arguments = TrainArguments[TRAININGS[kind][KINDS[kind]]]
    sides = ("--source", "--target") if isinstance(default.training, PairTraining) else ()
    return parse(arguments, "train", argv, default, (*sides, *MAIN_FLAGS))


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
        accepted = ", ".join("--" + field.replace("_", "-") for field in RESUMABLE)
        raise ValueError(
            f"--{name.replace('_', '-')} is {after}, but the run in {folder.path} was started with "
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
    """The arguments that determine the flags and their defaults.

    Attributes:
        model: The value of --model; None if it was not given.
        named_preset: The value of --preset; None if it was not given.
        base: The value of --from; None if it was not given.
        kind: The kind of model: that of --model, otherwise the first kind of the preset.
        preset: The preset: that of --preset, otherwise the first one for the kind.
        out: The run folder; None if --out was not given.
        resume: Whether --resume was given.
    """

    model: str | None
    named_preset: str | None
    base: str | None
    kind: str
    preset: str
    out: Path | None
    resume: bool


def read_selection(argv: list[str]) -> Selection:
    """Returns the arguments that `train` needs before it can build its flags.

    Args:
        argv: The words after `train`.

    Raises:
        UsageError: A flag lacks its value.
        ValueError: --model or --preset has an unknown value.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--preset")
    parser.add_argument("--from", dest="base")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    try:
        parsed, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    if parsed.model not in (None, *KINDS):
        raise ValueError(f"--model is {parsed.model!r}; it must be one of {', '.join(KINDS)}")
    kind = parsed.model or next(iter(kinds_of(parsed.preset or "stdlib")), "decoder")
    preset = parsed.preset or usual_preset(kind)
    training_preset(preset, kind)
    named = parsed.model, parsed.preset, parsed.base
    return Selection(*named, kind, preset, parsed.out, parsed.resume)


class SetFields(NamedTuple):
    """The fields of a run that the command line sets.

    Attributes:
        names: Names of all these fields.
        values: Their values, except those that only the parser can read (patterns, mistakes).
    """

    names: frozenset[str]
    values: dict[str, Any]


def fields_set_in(argv: list[str], training: TrainingConfig) -> SetFields:
    """Returns the fields that flags set.

    Args:
        argv: The command line.
        training: The config whose fields, and whose nested dataclasses' fields, count.
    """
    hints, names, values = _hints(training), set(), {}
    for flag, words in flags_in(argv):
        name = flag.replace("-", "_")
        field = name if name in hints else name.removeprefix("no_")
        if field in hints:
            names.add(field)
            with suppress(ValueError):
                values[field] = _value(hints[field], field == name, words)
    return SetFields(frozenset(names), values)


def field_values(training: TrainingConfig) -> dict[str, Any]:
    """Returns the fields of a run and of its nested dataclasses by name."""
    values = {}
    for entry in fields(training):
        value = getattr(training, entry.name)
        if is_dataclass(value) and not isinstance(value, Mesh):
            values |= {inner.name: getattr(value, inner.name) for inner in fields(value)}
        else:
            values[entry.name] = value
    return values


@contextmanager
def attributed(training: TrainingConfig, set_fields: SetFields, owner: str) -> Iterator[None]:
    """Adds the origin of a value to error messages about fields that the command line did not set.

    For example, "window_length is 128" becomes "the preset's window_length is 128".

    Args:
        training: The settings before the command line changed them.
        set_fields: The fields that the command line sets.
        owner: The words to add, such as "the preset's".

    Yields:
        None, for the `with` block whose errors are changed.
    """
    try:
        yield
    except (ValueError, UsageError) as error:
        others = field_values(training).keys() - set_fields.names
        names = "|".join(sorted(map(re.escape, others), key=len, reverse=True))
        pattern = rf"(?<![\w-])(?<!'s )({names})(?= is -?[\d'\"NTF]| \(-?\d)"
        message = re.sub(pattern, rf"{owner} \1", str(error))
        if message == str(error):
            raise
        kind = UsageError if isinstance(error, UsageError) else ValueError
        raise kind(message) from error


def _hints(training: TrainingConfig) -> dict[str, Any]:
    """Returns the types of the fields of a run and of its nested dataclasses."""
    hints = type_hints(type(training)).copy()
    for entry in fields(training):
        value = getattr(training, entry.name)
        if is_dataclass(value) and not isinstance(value, Mesh):
            hints |= type_hints(type(value))
    return hints


def _value(hint: Any, positive: bool, words: list[str]) -> Any:
    """Returns the value of a flag; raises ValueError if only the parser can read it."""
    accepted = get_args(hint) or (hint,)  # the members of a Union or the choices of a Literal
    if bool in accepted:
        return positive
    word = words[0] if words else ""
    if word == "None" and type(None) in accepted:
        return None
    if Mesh in accepted:
        return read_mesh(word)
    if any(get_origin(member) is tuple for member in accepted):
        raise ValueError("a pattern")
    for number in (int, float):
        if number in accepted:
            return number(word)
    if word in accepted:
        return word
    raise ValueError("none of these")
