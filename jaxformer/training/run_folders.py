"""Run folders: names, config.json, locks, data preparation, and the search for unfinished runs."""

import os
import re
import shutil
import unicodedata
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from jaxformer.artifacts.files import check_utf8
from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind, read_origin, read_sections
from jaxformer.models.config import architecture_name
from jaxformer.training.config import Inputs, RunConfig, TrainingConfig
from jaxformer.training.data.documents import HUB
from jaxformer.training.own_names import read_own_names
from jaxformer.training.presets import config_class

if TYPE_CHECKING:
    from jaxformer.training.screen import Screen


try:
    import fcntl
except ImportError:  # Windows has no fcntl.
    fcntl = None

# Name of a run that trains on the source code of Python's standard library.
LIBRARY = "stdlib"
# File systems accept names of at most 255 bytes. This limit is smaller, to leave space for the
# words and numbers that `run_name` and `next_free` append.
_MOST_BYTES = 80
# Names of devices on Windows, which files and folders cannot have.
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$")


def run_name(inputs: Inputs, kind: str, tuned: bool = False) -> str:
    """Returns the name of a run, such as `book` or `book-encoder-tuned`.

    Args:
        inputs: The inputs of the run. The name begins with the name of the first file.
        kind: The kind of model, a key of `KINDS`. The name does not contain "decoder".
        tuned: Whether the run starts from the weights of a checkpoint.

    Returns:
        A path component that every file system accepts.
    """
    text = inputs.source or (inputs.text[0] if inputs.text else None)
    parts = [LIBRARY if text is None else _text_name(str(text))]
    parts += [kind] * (kind != "decoder") + ["tuned"] * tuned
    return "-".join(parts)


def _text_name(text: str) -> str:
    """Returns the name of a file (without suffixes), a folder or a Hugging Face dataset."""
    if text.startswith(HUB):
        return file_name(text.removeprefix(HUB).partition(":")[0].split("/", 1)[-1])
    path = Path(os.path.abspath(text))
    # For a path that is too long, `os.path.isdir` returns False, but `Path.is_dir` may raise an
    # error.
    if os.path.isdir(path):
        return file_name(path.name)
    return file_name(Path(re.sub(r"\.(gz|zst)$", "", path.name)).stem)


def file_name(name: str) -> str:
    """Makes a name that every file system accepts.

    Replaces all characters other than letters, digits, dots and underscores by hyphens.

    The result has at most 80 bytes. The result starts with neither a dot nor a hyphen, because such
    a name would be a hidden file, a parent folder or a flag.
    """
    name = re.sub(r"[^\w.]+|\.{2,}", "-", unicodedata.normalize("NFC", name))
    name = name.encode()[:_MOST_BYTES].decode(errors="ignore").strip("-.")
    return f"text-{name}" if _RESERVED.match(name) else name or "text"


def run_title(folder: RunFolder) -> str:
    """Returns the title of a run's plot: the run's name, or for `fit`, the folder's name."""
    sections = folder.read_config()
    if "objective" in sections:
        return folder.path.name
    inputs = parse_inputs(sections, folder.config)
    return run_name(inputs, sections.get("kind", "decoder"), tuned=inputs.origin is not None)


def read_run(folder: RunFolder) -> tuple[Inputs, TrainingConfig]:
    """Returns the inputs and the config of a run.

    Raises:
        ValueError: A key is unknown, missing or has a wrong value. The message names the file and
            the key.
    """
    sections = folder.read_config("model", "training")
    if "objective" in sections:
        # `artifacts.values` imports JAX, which takes long.
        from jaxformer.artifacts.values import described

        raise ValueError(
            f"{folder.path} was trained by a Python script with the objective "
            f"{described(sections['objective'])}; to continue, call "
            "jaxformer.training.fit.fit(...) with this objective in Python"
        )
    model, training = parse_kind(sections, folder.config), sections["training"]
    for name in ("execution", "optimizer", "lora"):
        if name not in training:
            raise ValueError(f'{folder.config}: "training" lacks the key "{name}"')
    if "model" in training:
        raise ValueError(
            f'{folder.config}: "model" must be a top-level section, not part of "training"'
        )
    kind = config_class(architecture_name(model), training)
    inputs = parse_inputs(sections, folder.config)
    own = read_own_names(sections, folder.config)
    return inputs, parse_config(kind, {**training, "model": model, "own": own}, folder.config)


def parse_inputs(sections: dict, where: Path) -> Inputs:
    """Returns the input paths and the base checkpoint of a run."""
    source, target = sections.get("source"), sections.get("target")
    return Inputs(sections.get("text") or (), source, target, read_origin(sections, where))


def config_sections(config: RunConfig) -> dict[str, Any]:
    """Returns a config as the sections of config.json.

    Functions that load a model read only the section "model".
    """
    training = {name: x for name, x in asdict(config).items() if name not in ("model", "own")}
    return {"kind": architecture_name(config.model), "model": config.model, "training": training}


def write_run(folder: RunFolder, inputs: Inputs, config: TrainingConfig) -> None:
    """Writes config.json."""
    paths = {"text": list(map(str, inputs.text))}
    paths |= {x: str(getattr(inputs, x)) for x in ("source", "target") if getattr(inputs, x)}
    began = {} if inputs.origin is None else inputs.origin.sections()
    folder.write_config({**config_sections(config), **config.own.sections(), **paths, **began})


@contextmanager
def locked(path: Path) -> Generator[bool]:
    """Holds an exclusive lock on the file `path` while the context is open.

    The file is created if needed and never removed. A run is in use if the file is locked, not if
    the file exists.

    Yields:
        True if the lock is held. False if the operating system or the file system does not support
        locks, as on some clusters.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    with path.open("a") as file:
        yield _lock(file)


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock on a file, without creating the file."""
    if not path.exists():
        return False
    try:
        with locked(path):
            return False
    except BlockingIOError:
        return True
    except OSError:  # This process has no permission to write to the file.
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
        folder: The run folder.
        kind: The kind of model, a key of `KINDS`.
        step: The step of the newest checkpoint, or 0 without a checkpoint.
        is_finished: Whether the run reached its step or time limit and scored all held-out text.
    """

    folder: RunFolder
    kind: str
    step: int
    is_finished: bool


class UnreadableRun(NamedTuple):
    """A run on disk that cannot be read, because of damage or a different version.

    Attributes:
        folder: The run folder.
        reason: The error message.
    """

    folder: RunFolder
    reason: str


def newest_unfinished(runs: Path, kind: str | None = None) -> Run:
    """Returns the most recently trained unfinished run in or below a folder.

    An older run that cannot be read is skipped with a warning.

    Args:
        runs: The folder, which is searched recursively. Run folders may have any name.
        kind: The kind of model, a key of `KINDS`; any kind if None.

    Raises:
        ValueError: No run is unfinished, or it is uncertain which unfinished run is the newest.
            The order of the runs is uncertain if a newer run is unreadable, or if the run has a
            copy. Copying changes the times of the files.
    """
    links_first = sorted(_folders_below(runs), key=lambda run: not run.path.is_symlink())
    # If links also lead to a run, the dict retains the path that is not a link.
    distinct = {run.path.resolve(): run for run in links_first}
    folders = sorted(distinct.values(), key=_trained_at, reverse=True)
    found = [run for run in map(inspect_run, folders) if run is not None]
    unreadable = [run for run in found if isinstance(run, UnreadableRun)]
    candidates = [run for run in found if isinstance(run, Run) and kind in (None, run.kind)]
    unfinished = [run for run in candidates if not run.is_finished]
    for run in unfinished:
        if not is_locked(run.folder.lock):
            _check_certain(run, runs, found)
            for skipped in unreadable:
                warnings.warn(
                    f"--resume ignores the unreadable run {skipped.folder.path}: {skipped.reason}",
                    stacklevel=2,
                )
            return run
    with_model = "" if kind is None else f" with --model {kind}"
    if unfinished:
        state = f"another process is training in {unfinished[0].folder.path}"
    elif unreadable:
        state = f"cannot read {unreadable[0].folder.path} ({unreadable[0].reason})"
    elif candidates:
        path = candidates[0].folder.path
        state = (
            f"{path} finished at step {candidates[0].step}; to train further, raise --steps or "
            f"--max-minutes and add --out {path}"
        )
    else:
        state = "the folder contains no run. Name a run in another folder with --out FOLDER"
    raise ValueError(f"--resume found no unfinished run{with_model} below {runs}: {state}")


def _check_certain(run: Run, runs: Path, found: Sequence[Run | UnreadableRun]) -> None:
    """Raises ValueError if it is uncertain whether a run is the newest unfinished run.

    The order is uncertain if a newer run is unreadable, or if `run` has copies.

    Args:
        run: The newest unfinished run.
        runs: The folder that was searched for runs.
        found: All runs in or below the folder, newest first.
    """
    first = found[0]
    start = _run_fingerprint(run.folder)
    copies = [x.folder.path for x in found if start and _run_fingerprint(x.folder) == start]
    if isinstance(first, UnreadableRun):
        state = f"{first.folder.path} is a newer run that cannot be read ({first.reason})"
    elif len(copies) > 1:
        state = f"{' and '.join(map(str, copies))} are copies of one run"
    else:
        return
    path = run.folder.path
    raise ValueError(
        f"--resume cannot choose a run in {runs}: {state}. Name the run with --out, such as "
        f"--out {path}"
    )


def _run_fingerprint(folder: RunFolder) -> tuple[bytes, bytes] | None:
    """Returns a fingerprint that a run shares only with its copies.

    The fingerprint consists of config.json and the first line of metrics.jsonl that has a training
    time. The fingerprint is None if there is no such line. Two runs with equal configs have equal
    losses, but different times.
    """
    if not folder.metrics.exists():
        return None
    with folder.metrics.open("rb") as file:
        timed = next((line for line in file if b'"seconds"' in line), b"")
    return (folder.config.read_bytes(), timed) if timed.endswith(b"\n") else None


def _folders_below(folder: Path) -> Iterator[RunFolder]:
    """Yields run folders and links to run folders, without searching inside a run folder."""
    for path, names, _ in os.walk(folder):  # os.walk skips unreadable folders.
        folders = [RunFolder(Path(path, name)) for name in sorted(names)]
        yield from (inner for inner in folders if inner.holds_run)
        names[:] = [inner.path.name for inner in folders if not inner.holds_run]


def _trained_at(folder: RunFolder) -> float:
    """Returns the latest modification time of the run's files that only training writes."""
    written = (folder.config, folder.metrics, folder.checkpoints)
    return max(path.stat().st_mtime for path in written if path.exists())


def inspect_run(folder: RunFolder) -> Run | UnreadableRun | None:
    """Returns the run in a folder, or None if the folder has no run of `jaxformer train`."""
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
    schedule = Schedule(config.optimizer, config.steps, config.max_minutes)
    is_finished = schedule.done(step, progress.get("seconds", 0.0)) >= 1 and any(
        line["step"] == step and "held_out_loss" in line for line in metrics
    )
    return Run(folder, architecture_name(config.model), step, is_finished)


def checkpoint_step(folder: RunFolder) -> int:
    """Returns the step of a run's newest checkpoint, or 0 without a checkpoint."""
    from jaxformer.artifacts.checkpoint import Checkpoints

    return Checkpoints(folder.checkpoints).progress()[0]


def prepare_run(
    folder: RunFolder,
    inputs: Inputs,
    config: TrainingConfig,
    screen: "Screen",
    stack: ExitStack,
    resume: bool,
    keep_base: Callable[[RunFolder, TrainingConfig], None] | None,
) -> None:
    """Creates and locks the run folder, and writes the tokenized data if they are missing.

    Args:
        folder: The run folder.
        inputs: The text or the pairs to read.
        config: The config of the run.
        screen: Shows progress.
        stack: Exit stack. Closing the stack releases the lock.
        resume: Whether to continue an existing run. If false, the folder must not contain a run.
        keep_base: Function that copies the base checkpoint's required files into the folder; None
            if the run has no base checkpoint.

    Raises:
        ValueError: The folder is in use, or the data are unsuitable for training.
    """
    from jaxformer.training.tasks import task_class

    kind, gathered, is_new = task_class(config), None, False
    if not resume:
        check_free(folder)
        # Errors in the inputs must be raised before the folder is created.
        gathered = kind.gather(inputs, config, screen)
        is_new = claim(folder)
    hold_lock(folder, screen.say, stack)
    # `kind.write` writes the baselines last, so a run without their file is incomplete.
    if not folder.baselines.exists():
        gathered = kind.gather(inputs, config, screen) if resume else gathered
        if keep_base is not None:
            keep_base(folder, config)
        write_run(folder, inputs, config)
        screen.say("preparing the data …")
        try:
            kind.write(folder, config, gathered, screen)
        except ValueError:
            if not resume:  # The data are unsuitable, so the new run is removed.
                _empty(folder.path, remove=is_new)
            raise
    screen.say(f"run folder: {folder.path}   documents: {folder.documents}")


def hold_lock(folder: RunFolder, say: Callable[[str], None], stack: ExitStack) -> None:
    """Locks the folder against other training processes until `stack` is closed."""
    try:
        if not stack.enter_context(locked(folder.lock)):
            say(
                f"warning: this system cannot lock {folder.path}; do not train in this folder "
                "with two processes, because neither would notice the other"
            )
    except BlockingIOError:
        raise ValueError(
            f"another process is training in {folder.path}; wait until it ends, or choose "
            "another folder with --out"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot write to {folder.path}: {error.strerror}") from None


def claim(folder: RunFolder) -> bool:
    """Creates the run folder.

    Args:
        folder: The run folder, which `check_free` has accepted.

    Returns:
        True if this call created the folder. False if the folder existed and was empty.

    Raises:
        ValueError: Another process has written into the folder after the call of `check_free`.
    """
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        if not folder.path.is_dir() or not folder.is_free:
            raise ValueError(
                f"another process has just created {folder.path}; run the command again"
            ) from None
        return False
    return True


def _empty(path: Path, remove: bool) -> None:
    """Deletes the contents of a folder, and also the folder if `remove` is true."""
    for inside in path.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    if remove:
        path.rmdir()


def check_free(folder: RunFolder) -> None:
    """Raises ValueError unless the folder is available for a new run."""
    check_utf8(folder.path)
    if folder.holds_run:
        raise ValueError(
            f"{folder.path} already holds a run; continue it with --resume, or choose another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file; --out must name a folder or a new path")
    if not folder.is_free:
        raise ValueError(f"{folder.path} contains files, but not a run; choose another --out")
