"""`jaxformer train [TEXT…] [--model KIND] [--preset P] [--out RUN] [--resume] [any field]`."""

import errno
import shlex
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Generic, Literal, TypeVar

import tyro

from jaxformer.artifacts.run import RunFolder, newest, next_free
from jaxformer.cli.arguments import parse
from jaxformer.cli.base import open_base, origin_of
from jaxformer.cli.begin import begin
from jaxformer.cli.first import peek
from jaxformer.cli.runtime import mesh_of
from jaxformer.models.config import KINDS, kind_of
from jaxformer.models.config.encoder_decoder import ReadsSource
from jaxformer.training.config import RESUMABLE, Inputs, MeshSizes, TrainingConfig, differences
from jaxformer.training.data.documents import HUB
from jaxformer.training.presets import TRAININGS, kinds_of, training_preset
from jaxformer.training.processes import (
    Processes,
    are_several,
    done_by_first,
    is_first,
    join,
    leave,
    require_same,
    wait_for_all,
)
from jaxformer.training.run_config import read_run, write_run

RUNS = Path("runs")


Training = TypeVar("Training")


@dataclass(frozen=True)
class TrainArguments(Generic[Training]):
    """Train a model on text, or on pairs of sentences, and leave a run folder.

    Without TEXT it trains on the Python standard library's own source. Encoder–decoders learn from
    --source and --target, line by line.
    """

    training: Training
    text: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT…")] = ()
    """files or folders of UTF-8 text; .jsonl and .parquet hold a text in each record; .gz and .zst
    are decompressed; hf:OWNER/NAME is a dataset of the hub"""
    source: Path | None = None
    """a file of sentences, or a .tsv or .jsonl of both sides; may be .gz"""
    target: Path | None = None
    """their translations, line by line"""
    base: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """what to begin with: a run, a saved folder, a folder in Hugging Face's format or a hub id; its
    tokenizer reads the text"""
    kind: Annotated[Literal[tuple(KINDS)], tyro.conf.arg(name="model")] = "decoder"
    """the kind of model"""
    preset: str = "stdlib"
    """the settings to start from; the other flags override them. With --from, plain ones"""
    out: Path | None = None
    """the run folder; by default the next free name below runs/"""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """continue the run in --out (by default the newest of this preset and kind)"""
    processes: Processes = field(default_factory=Processes)

    @property
    def inputs(self) -> Inputs:
        """What is read, wherever a later start of the run may be."""
        text = tuple(x if str(x).startswith(HUB) else x.absolute() for x in self.text)
        return Inputs(text, *(x and x.absolute() for x in (self.source, self.target)))


def main(argv: list[str]) -> int:
    """Parse, prepare, train."""
    if "" in argv:  # the path of this folder, if it were read as one
        raise ValueError("an argument is empty")
    first = peek(argv)
    name = first.preset if first.kind == kinds_of(first.preset)[0] else None
    name = name or f"{first.preset}-{first.kind}"
    if first.resume:
        folder = RunFolder(first.out or newest(RUNS, name))
        inputs, training = read_run(folder)
        kind = kind_of(training.model)
        if first.asked not in (None, kind):
            raise ValueError(f"--model is {first.asked!r}, but {folder.path} is of kind {kind}")
        default = TrainArguments(training, kind=kind, preset=first.preset, out=first.out)
        arguments = parse(_arguments_for(kind), "train", argv, default)
        refuse_changes(folder, training, arguments)
        return _train(folder, inputs, arguments, resume=True)
    base = None if first.base is None else open_base(first)
    training = training_preset(first.preset, first.kind) if base is None else base.training
    if first.by_time:
        training = replace(training, steps=None, minutes=1.0)
    kind, name = (first.kind, name) if base is None else (base.kind, base.name)
    default = TrainArguments(training, base=first.base, kind=kind, preset=first.preset)
    arguments = parse(_arguments_for(kind), "train", argv, default)
    if arguments.processes.coordinator and arguments.out is None:
        raise ValueError("--out is missing; several processes must be told where their run is")
    folder = RunFolder(arguments.out or next_free(RUNS, name))
    if base is not None:
        base.accept(arguments.training)
    elif arguments.training.lora.lora_rank is not None:
        raise ValueError(
            f"--lora-rank is {arguments.training.lora.lora_rank}, but there is no --from: an "
            "adapter is learnt of weights that are there"
        )
    return _train(folder, arguments.inputs, arguments, resume=False, base=base)


def _arguments_for(kind: str):
    """The arguments whose flags are those of that kind of model, and of its training."""
    return TrainArguments[TRAININGS[kind][KINDS[kind]]]


def refuse_changes(folder, old: TrainingConfig, arguments: TrainArguments) -> None:
    """A resumed run computes what it would have: only its length and its watching may change."""
    changed = differences(old, arguments.training)
    refused = {name: pair for name, pair in changed.items() if name not in RESUMABLE}
    for name, value in (*arguments.inputs._asdict().items(), ("--from", arguments.base)):
        if value:
            raise ValueError(f"{name} was given, but {folder.path} resumes on what it began with")
    for name, (before, after) in refused.items():
        accepted = ", ".join("--" + field.replace("_", "-") for field in RESUMABLE)
        raise ValueError(
            f"--{name.replace('_', '-')} is {after}, but the run in {folder.path} began with "
            f"{before}; when resuming only {accepted} may change"
        )
    if "steps" in changed and arguments.training.steps is not None:
        from jaxformer.artifacts.checkpoint import Checkpoints

        *_, last = (0, *Checkpoints(folder.checkpoints).steps())
        if arguments.training.steps < last:
            raise ValueError(
                f"--steps is {arguments.training.steps}, but the run in {folder.path} is at {last}"
            )


def _train(folder: RunFolder, inputs: Inputs, arguments, *, resume: bool, base=None) -> int:
    """base: the `Base` of a new run, None: it begins with nothing."""
    from jaxformer.training.screen import Screen
    from jaxformer.training.signals import Ended, Interrupted
    from jaxformer.training.tasks import task_of
    from jaxformer.training.trackers import require_trackers

    config, params = arguments.training, None
    require_trackers(config.trackers)
    join(arguments.processes)
    first = arguments.processes.coordinator is None or is_first()
    require_same(_told(config))
    screen, kind = Screen(quiet=not first), task_of(config)
    mesh = mesh_of(config, screen.say)
    spread = _spread(config, mesh)
    if base is not None:
        params, origin = base.read(mesh)
        inputs = inputs._replace(origin=origin)
    try:
        with ExitStack() as held:
            start = partial(begin, folder, inputs, config, screen, held, resume, base)
            done_by_first("the text is read", start)
            task = kind.read(folder, spread)
            for line in task.description():
                screen.say(line)
            if inputs.origin is None:
                config = replace(config, model=fitted(config.model, task.tokenizer, screen.say))
            elif resume:
                params = origin_of(folder, inputs.origin, config, mesh)
            if first:
                write_run(folder, inputs, config)
            _run(_spread(config, mesh), folder, task, screen, mesh, resume, params)
    except KeyboardInterrupt:
        if folder.holds_run:  # else nothing is there
            raise Interrupted(SIGINT, f"interrupted; {_go_on(folder)}") from None
        raise
    except Exception as error:
        if are_several() and isinstance(error, RuntimeError):  # what JAX's runtime raises
            leave(f"another process has ended, or cannot be reached; {_go_on(folder)} ({error})")
        if _is_out_of_memory(error):
            raise Ended(
                f"out of memory; a smaller --batch-size (or --batch-tokens) with a larger "
                f"--accumulate, or --remat full, needs less ({error})"
            ) from error
        if _disk_is_full(error):
            from jaxformer.artifacts.checkpoint import Checkpoints

            last = Checkpoints(folder.checkpoints).last()
            raise OSError(f"the disk is full, so the run ends here; {last}") from error
        raise
    if first:
        _report(folder, task, screen.say)
    wait_for_all("the end")
    return 0


def _told(config: TrainingConfig) -> dict[str, object]:
    """What all processes of a run must have been started with, by the names of its flags; where
    text and run are may be called otherwise on another machine."""
    from jax import __version__

    parts = {name: getattr(config, name) for name in ("model", "optimizer", "execution", "lora")}
    found = {f"--{x}": getattr(config, x) for x in config.__dataclass_fields__ if x not in parts}
    for part in parts.values():
        found |= {f"--{x}": getattr(part, x) for x in part.__dataclass_fields__}
    found = {name.replace("_", "-"): value for name, value in found.items()}
    return {**found, "--model": kind_of(config.model), "the version of JAX": __version__}


def _spread(config: TrainingConfig, mesh) -> TrainingConfig:
    """With the mesh that it is on; config.json has the one that was asked for, so that a run may go
    on on other devices. ValueError if a batch does not divide."""
    return config if mesh is None else replace(config, mesh=MeshSizes(**mesh.shape))


def _run(config, folder: RunFolder, task, screen, mesh, resume: bool, params) -> None:
    """params: what the run begins with; None: fresh parameters, or those of its checkpoint."""
    import jax

    from jaxformer.training.loop import Training

    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        training = Training(config, folder, task, screen, mesh, params)
        if resume:
            training.resume()
        training.run()


def _is_out_of_memory(error: Exception) -> bool:
    """The device's, as XLA says it."""
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "Out of memory" in said or ("RESOURCE_EXHAUSTED" in said and not _disk_is_full(error))
    )


def _go_on(folder: RunFolder) -> str:
    """How a run goes on."""
    return f"go on with: jaxformer train --resume --out {shlex.quote(str(folder.path))}"


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether this is the reason, however deep in what the libraries made of it."""
    full = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED: No space")
    return error is not None and (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(words in str(error) for words in full)
        or _disk_is_full(error.__cause__ or error.__context__)
    )


def fitted(model, tokenizer, say):
    """The config with the vocabulary that was learnt, which a small text leaves below what was
    asked for: an id that stands for no text must not be there to be generated."""
    if tokenizer.vocab_size < model.vocab_size:
        say(
            f"vocabulary: {tokenizer.vocab_size:,} tokens (the text has no more; vocab_size was "
            f"{model.vocab_size:,})"
        )
    sizes = {"vocab_size": tokenizer.vocab_size}
    if isinstance(model, ReadsSource):
        sizes["source_vocab_size"] = None
    return replace(model, **sizes)


def _report(folder: RunFolder, task, say) -> None:
    """The last evaluation beside what others make of the same text."""
    name, label = task.measure
    finals = [line[name] for line in folder.read_metrics() if name in line]
    scores = {"this model": finals[-1], **task.baselines} if finals else task.baselines
    say(
        f"held-out text ({task.num_targets:,} targets), {label}: "
        + " · ".join(f"{who} {value:.3f}" for who, value in scores.items())
    )
    if samples := folder.read_samples():
        say(f"a sample:\n{samples[-1][1]}")
    say(f"picture: {folder.picture}   samples: {folder.samples}")
    verb, *words = task.example()
    say(f"next: jaxformer {shlex.join([verb, str(folder.path), *words])}")
