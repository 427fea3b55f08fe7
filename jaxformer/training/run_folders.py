"""Run folders: names, config.json, lock, preparation, and the search for an unfinished run."""

import os
import re
import shutil
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from jaxformer.artifacts.files import check_utf8
from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind, read_origin, read_sections
from jaxformer.models.config import kind_of
from jaxformer.training.config import Inputs, RunConfig, TrainingConfig
from jaxformer.training.data.documents import HUB
from jaxformer.training.presets import TRAININGS

if TYPE_CHECKING:
    from jaxformer.training.screen import Screen


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LIBRARY = "stdlib"  # the name of a run without TEXT, which trains on the standard library
_MOST_BYTES = 80  # file systems accept 255; the kind and next_free make the name longer
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$")  # devices on Windows


def run_name(inputs: Inputs, kind: str, tuned: bool = False) -> str:
    """Returns the name of a run: the name of its text, and its kind unless it is a decoder.

    Args:
        inputs: The inputs of the run. If there are several files, the first gives the name.
        kind: The kind of model, a key of `KINDS`.
        tuned: Whether the run begins with the weights of a checkpoint.

    Returns:
        One path component that every file system accepts.
    """
    text = inputs.source or (inputs.text[0] if inputs.text else None)
    parts = [LIBRARY if text is None else _text_name(str(text))]
    parts += [kind] * (kind != "decoder") + ["tuned"] * tuned
    return "-".join(parts)


def _text_name(text: str) -> str:
    """Returns the name of a file (without suffixes), a folder or a dataset of the hub."""
    if text.startswith(HUB):
        return _safe(text.removeprefix(HUB).partition(":")[0].split("/", 1)[-1])
    path = Path(os.path.abspath(text))
    if os.path.isdir(path):  # unlike `Path.is_dir`, it accepts a path that is too long
        return _safe(path.name)
    return _safe(Path(re.sub(r"\.(gz|zst)$", "", path.name)).stem)


def _safe(name: str) -> str:
    """Returns the letters, digits, dots and underscores of a name, with hyphens for the rest.

    The name has at most 80 bytes. It does not begin with a dot or a hyphen, so that it is not
    hidden, a parent folder or a flag.
    """
    name = re.sub(r"[^\w.]+|\.{2,}", "-", unicodedata.normalize("NFC", name))
    name = name.encode()[:_MOST_BYTES].decode(errors="ignore").strip("-.")
    return f"text-{name}" if _RESERVED.match(name) else name or "text"


def title_of(folder: RunFolder) -> str:
    """Returns the title of a run's picture: its name or, for a run of a script, its folder."""
    sections = folder.read_config()
    if "objective" in sections:
        return folder.path.name
    inputs = parse_inputs(sections, folder.config)
    return run_name(inputs, sections.get("kind", "decoder"), tuned=inputs.origin is not None)


def read_run(folder: RunFolder) -> tuple[Inputs, TrainingConfig]:
    """Returns the inputs and the config of a run.

    Raises:
        ValueError: A key is unknown, missing or wrong. The message names the file and the key.
    """
    sections = folder.read_config("model", "training")
    if "objective" in sections:
        raise ValueError(
            f"{folder.path} is a run of a script with the objective {sections['objective']}; only "
            "the script can continue it"
        )
    model, training = parse_kind(sections, folder.config), sections["training"]
    for name in ("execution", "optimizer", "lora"):
        if name not in training:
            raise ValueError(f"{folder.config}: training has no {name}")
    if "model" in training:
        raise ValueError(f"{folder.config}: training has a model; it must be a separate section")
    kind = TRAININGS[kind_of(model)]
    inputs = parse_inputs(sections, folder.config)
    return inputs, parse_config(kind, {**training, "model": model}, folder.config)


def parse_inputs(sections: dict, where: Path) -> Inputs:
    """Returns the paths that a run reads and its base checkpoint."""
    source, target = sections.get("source"), sections.get("target")
    return Inputs(sections.get("text") or (), source, target, read_origin(sections, where))


def config_sections(config: RunConfig) -> dict[str, Any]:
    """Returns a config as sections of config.json; loading needs only those of the model."""
    training = {name: x for name, x in asdict(config).items() if name != "model"}
    return {"kind": kind_of(config.model), "model": config.model, "training": training}


def write_run(folder: RunFolder, inputs: Inputs, config: TrainingConfig) -> None:
    """Writes config.json."""
    paths = {"text": list(map(str, inputs.text))}
    paths |= {x: str(getattr(inputs, x)) for x in ("source", "target") if getattr(inputs, x)}
    began = {} if inputs.origin is None else inputs.origin.sections()
    folder.write_config({**config_sections(config), **paths, **began})


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock on the file `path` inside the context.

    The file is created if needed and is never removed. Its existence means nothing.

    Yields:
        True if the lock is held. False if the operating system or the file system has no locks, as
        on some clusters.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    with path.open("a") as file:
        yield _lock(file)


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock. Does not create the file."""
    if not path.exists():
        return False
    try:
        with locked(path):
            return False
    except BlockingIOError:
        return True
    except OSError:  # no permission to write
        return False


def _lock(file: TextIO) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


class Run(NamedTuple):
    """A run on disk.

    Attributes:
        folder: Its folder.
        kind: The kind of its model.
        step: The step of its newest checkpoint, 0 without one.
        is_finished: Whether it has trained to its end and scored all held-out text.
    """

    folder: RunFolder
    kind: str
    step: int
    is_finished: bool


class UnreadableRun(NamedTuple):
    """A run on disk that cannot be read: it is damaged, or another version wrote it.

    Attributes:
        folder: Its folder.
        reason: The error.
    """

    folder: RunFolder
    reason: str


def newest_unfinished(runs: Path, kind: str | None = None) -> Run:
    """Returns the most recently trained unfinished run below a folder.

    A run that cannot be read is skipped with a warning if it is older.

    Args:
        runs: The folder. Runs may be at any depth, under any name.
        kind: The kind of model; None: any kind.

    Raises:
        ValueError: There is none; the message gives the state of the newest run. Or the choice is
            not certain: a run that cannot be read is newer, or the run has a copy, whose files are
            newer than those of other runs only because they were copied later.
    """
    links_first = sorted(_folders_below(runs), key=lambda run: not run.path.is_symlink())
    distinct = {run.path.resolve(): run for run in links_first}  # a run goes by its own path
    folders = sorted(distinct.values(), key=_trained_at, reverse=True)
    found = [run for run in map(_read, folders) if run is not None]
    unreadable = [run for run in found if isinstance(run, UnreadableRun)]
    candidates = [run for run in found if isinstance(run, Run) and kind in (None, run.kind)]
    unfinished = [run for run in candidates if not run.is_finished]
    for run in unfinished:
        if not is_locked(run.folder.lock):
            _check_certain(run, runs, found)
            for skipped in unreadable:
                warnings.warn(
                    f"--resume skips {skipped.folder.path}: {skipped.reason}", stacklevel=2
                )
            return run
    of_kind = "" if kind is None else f" of kind {kind}"
    if unfinished:
        state = f"{unfinished[0].folder.path} is being trained by another process"
    elif unreadable:
        state = f"{unreadable[0].folder.path} cannot be read ({unreadable[0].reason})"
    elif candidates:
        path = candidates[0].folder.path
        state = (
            f"{path} is finished (step {candidates[0].step}); to train it further, give "
            f"--out {path} and more --steps or --minutes"
        )
    else:
        state = "there is no run; for a run in another folder, give --out FOLDER"
    raise ValueError(f"--resume found no unfinished run{of_kind} below {runs}: {state}")


def _check_certain(run: Run, runs: Path, found: Sequence[Run | UnreadableRun]) -> None:
    """Raises ValueError if another run may be the one that the user means.

    Args:
        run: The newest unfinished run.
        runs: The folder that was searched.
        found: All runs, the newest first.
    """
    first = found[0]
    start = _start_of(run.folder)
    copies = [x.folder.path for x in found if start and _start_of(x.folder) == start]
    if isinstance(first, UnreadableRun):
        state = f"{first.folder.path} is newer, but cannot be read ({first.reason})"
    elif len(copies) > 1:
        state = f"{' and '.join(map(str, copies))} are copies of one run"
    else:
        return
    path = run.folder.path
    raise ValueError(
        f"--resume cannot choose a run below {runs}: {state}. Name the run with --out, such as "
        f"--out {path}"
    )


def _start_of(folder: RunFolder) -> tuple[bytes, bytes] | None:
    """Returns what a run shares only with its copies; None before its first measured time.

    That is its config and its first line of metrics that has the seconds of training. The losses
    of two runs with one config are equal, but their times differ.
    """
    if not folder.metrics.exists():
        return None
    with folder.metrics.open("rb") as file:
        timed = next((line for line in file if b'"seconds"' in line), b"")
    return (folder.config.read_bytes(), timed) if timed.endswith(b"\n") else None


def _folders_below(folder: Path) -> Iterator[RunFolder]:
    """Yields the folders of runs and links to runs. It does not search inside either."""
    for path, names, _ in os.walk(folder):  # skips unreadable folders
        folders = [RunFolder(Path(path, name)) for name in sorted(names)]
        yield from (inner for inner in folders if inner.holds_run)
        names[:] = [inner.path.name for inner in folders if not inner.holds_run]


def _trained_at(folder: RunFolder) -> float:
    """Returns the time of the last write by training, from files that reading never changes."""
    written = (folder.config, folder.metrics, folder.checkpoints)
    return max(path.stat().st_mtime for path in written if path.exists())


def _read(folder: RunFolder) -> Run | UnreadableRun | None:
    """Returns the run of `jaxformer train`; None for a run of a script and for a saved model."""
    from jaxformer.artifacts.checkpoint import Checkpoints
    from jaxformer.training.optimizer import Schedule

    try:
        sections = read_sections(folder.path)
        if sections is None or "training" not in sections or "objective" in sections:
            return None
        _, config = read_run(folder)
        step, progress = Checkpoints(folder.checkpoints).progress()
        metrics = folder.read_metrics()
    except ValueError as error:
        return UnreadableRun(folder, str(error))
    schedule = Schedule(config.optimizer, config.steps, config.minutes)
    is_finished = schedule.done(step, progress.get("seconds", 0.0)) >= 1 and any(
        line["step"] == step and "held_out_loss" in line for line in metrics
    )
    return Run(folder, kind_of(config.model), step, is_finished)


def prepare_run(
    folder: RunFolder,
    inputs: Inputs,
    config: TrainingConfig,
    screen: "Screen",
    stack: ExitStack,
    resume: bool,
    keep_base: Callable[[RunFolder, TrainingConfig], None] | None,
) -> None:
    """Creates and locks the run folder, and writes the tokenized data unless it already exists.

    Args:
        folder: The run folder.
        inputs: The text or the pairs to read.
        config: The `TrainingConfig`.
        screen: Where progress is shown.
        stack: An `ExitStack` that holds the lock until it is closed.
        resume: Whether the run continues; otherwise the folder must not hold a run.
        keep_base: Copies into the folder what a new run needs from the checkpoint that it starts
            from; None: the run starts from fresh parameters.

    Raises:
        ValueError: The folder is in use, or the data cannot be trained on.
    """
    from jaxformer.training.tasks import task_of

    kind, gathered, is_new = task_of(config), None, False
    if not resume:
        check_free(folder)
        gathered = kind.gather(inputs, config, screen)  # raises before the folder is created
        is_new = claim(folder)
    hold_lock(folder, screen.say, stack)
    if not folder.baselines.exists():  # the last file of an earlier preparation
        gathered = kind.gather(inputs, config, screen) if resume else gathered
        if keep_base is not None:
            keep_base(folder, config)
        write_run(folder, inputs, config)
        screen.say("reading …")
        try:
            kind.write(folder, config, gathered, screen)
        except ValueError:
            if not resume:  # the data were rejected late: remove the new run
                _empty(folder.path, remove=is_new)
            raise
    screen.say(f"run folder: {folder.path}   documents: {folder.documents}")


def hold_lock(folder: RunFolder, say: Callable[[str], None], stack: ExitStack) -> None:
    """Locks the folder against other training processes until `stack` is closed."""
    try:
        if not stack.enter_context(locked(folder.lock)):
            say(
                f"warning: no locks for {folder.path} on this system; a second process that trains "
                "in this folder would not be detected"
            )
    except BlockingIOError:
        raise ValueError(
            f"{folder.path} is being trained by another process; wait until it ends, or "
            "choose another --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder.path} cannot be written: {error.strerror}") from None


def claim(folder: RunFolder) -> bool:
    """Creates the run folder.

    Args:
        folder: The run folder, which was free when it was last checked.

    Returns:
        Whether this call created it; False if it was there and empty.

    Raises:
        ValueError: Another process has put a run or files into it in the meantime.
    """
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        if not folder.path.is_dir() or not folder.is_free:
            raise ValueError(
                f"{folder.path} has just been created by another process; run the command again"
            ) from None
        return False
    return True


def _empty(path: Path, remove: bool) -> None:
    """Deletes the contents of the folder, and the folder itself if `remove` is true."""
    for inside in path.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    if remove:
        path.rmdir()


def check_free(folder: RunFolder) -> None:
    """Raises ValueError unless a new run may be put into the folder."""
    check_utf8(folder.path)
    if folder.holds_run:
        raise ValueError(
            f"{folder.path} already holds a run; continue it with --resume, or choose another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file; --out must name a folder or a new path")
    if not folder.is_free:
        raise ValueError(f"{folder.path} is not empty and holds no run; choose another --out")
