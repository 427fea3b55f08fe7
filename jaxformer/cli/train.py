"""`jaxformer train [TEXT…] [--preset P] [--out RUN] [--resume] [any field of the configs]`."""

import errno
import shlex
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import tyro

from jaxformer.artifacts.lock import locked
from jaxformer.artifacts.run import RunFolder, newest, next_free, parse_config
from jaxformer.cli.arguments import UsageError, parse
from jaxformer.models.config import DecoderConfig, Execution
from jaxformer.training.config import (
    RESUMABLE,
    OptimizerConfig,
    Preset,
    TrainingConfig,
    differences,
    training_preset,
)

RUNS = Path("runs")


@dataclass(frozen=True)
class TrainArguments:
    """Train a Transformer on text and leave a run folder.

    Without TEXT it trains on the Python standard library's own source.
    """

    text: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT…")] = ()
    """files or folders of UTF-8 text"""
    preset: Preset = "stdlib"
    """the settings to start from; the other flags override them"""
    out: Path | None = None
    """the run folder; by default the next free name below runs/"""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """continue the run in --out (by default the newest of this preset)"""
    training: TrainingConfig = field(default_factory=TrainingConfig)


def main(argv: list[str]) -> int:
    """Parse, prepare, train."""
    first, _ = _peek(argv)
    if first.resume:
        folder = RunFolder(first.out or newest(RUNS, first.preset))
        paths, training = read_run(folder)
        arguments = parse(
            TrainArguments, "train", argv, replace(first, resume=False, training=training)
        )
        refuse_changes(folder, training, arguments)
    else:
        default = TrainArguments(preset=first.preset, training=training_preset(first.preset))
        arguments = parse(TrainArguments, "train", argv, default)
        folder = RunFolder(arguments.out or next_free(RUNS, arguments.preset))
        paths = [path.absolute() for path in arguments.text]
        if folder.holds_run:
            raise ValueError(
                f"{folder.path} already holds a run; go on with it by --resume, or choose another "
                "--out"
            )
        if folder.path.exists() and not folder.path.is_dir():
            raise ValueError(f"{folder.path} is a file; --out must be a folder or not exist yet")
        if folder.path.exists() and any(folder.path.iterdir()):
            raise ValueError(f"{folder.path} is not empty and holds no run; choose another --out")
    return _train(folder, paths, arguments.training, first.resume)


def _peek(argv):
    """The arguments that decide on the defaults of the others, read leniently beforehand."""
    import argparse

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--preset", default="stdlib")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    try:
        parsed, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    training_preset(parsed.preset)
    return TrainArguments(preset=parsed.preset, out=parsed.out, resume=parsed.resume), rest


def read_run(folder: RunFolder) -> tuple[list[Path], TrainingConfig]:
    """What a run was started with: its texts and its config."""
    sections = folder.read_config("model", "training", "text")
    plain = {**sections["training"], "model": sections["model"]}
    for name, kind in _NESTED.items():
        plain[name] = parse_config(kind, plain.get(name), folder.config)
    return [Path(p) for p in sections["text"]], parse_config(TrainingConfig, plain, folder.config)


_NESTED = {"model": DecoderConfig, "execution": Execution, "optimizer": OptimizerConfig}


def write_run(folder: RunFolder, paths: list[Path], config: TrainingConfig) -> None:
    """config.json: the model apart, since whoever loads the run needs that alone."""
    training = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
    plain = {name: vars(value) if name in _NESTED else value for name, value in training.items()}
    texts = [str(path) for path in paths]
    folder.write_config({"model": config.model, "training": plain, "text": texts})


def refuse_changes(folder, old: TrainingConfig, arguments: TrainArguments) -> None:
    """A resumed run computes what it would have: only its length and its watching may change."""
    changed = differences(old, arguments.training)
    refused = {name: pair for name, pair in changed.items() if name not in RESUMABLE}
    if arguments.text:
        raise ValueError(f"text was given, but {folder.path} resumes on the text it began with")
    for name, (before, after) in refused.items():
        accepted = ", ".join("--" + field.replace("_", "-") for field in RESUMABLE)
        raise ValueError(
            f"--{name.replace('_', '-')} is {after}, but the run in {folder.path} began with "
            f"{before}; when resuming only {accepted} may change"
        )
    if "steps" in changed:
        from jaxformer.artifacts.checkpoint import Checkpoints

        *_, last = (0, *Checkpoints(folder.checkpoints).steps())
        if arguments.training.steps < last:
            raise ValueError(
                f"--steps is {arguments.training.steps}, but the run in {folder.path} is at {last}"
            )


def _train(folder: RunFolder, paths, config: TrainingConfig, resume: bool) -> int:
    from jaxformer.training import prepare
    from jaxformer.training.screen import Screen

    screen = Screen()
    texts = None
    if not resume:
        texts = prepare.gather(paths, config)  # nothing is created before it is accepted
        claim(folder.path)
    try:
        with _alone(folder, screen.say):
            data = _prepare(folder, paths, config, screen.say, texts)
            config = replace(config, model=fitted(config.model, data.tokenizer, screen.say))
            write_run(folder, paths, config)
            _run(config, folder, data, screen, resume)
    except Exception as error:
        if _disk_is_full(error):
            from jaxformer.artifacts.checkpoint import Checkpoints

            last = Checkpoints(folder.checkpoints).last()
            raise OSError(f"the disk is full, so the run ends here; {last}") from error
        raise
    _report(folder, data, config.model.max_length, screen.say)
    return 0


def _run(config: TrainingConfig, folder: RunFolder, data, screen, resume: bool) -> None:
    from jaxformer.cli.runtime import start_jax

    start_jax()
    from jaxformer.training.loop import Training

    training = Training(config, folder, data, screen)
    if resume:
        training.resume()
    training.run()


@contextmanager
def _alone(folder: RunFolder, say):
    """While open, no other process trains in the folder."""
    with ExitStack() as held:
        try:
            if not held.enter_context(locked(folder.lock)):
                say(f"no locks for {folder.path}: a second start on it would not be noticed")
        except BlockingIOError:
            raise ValueError(
                f"{folder.path} is being trained by another process; wait until it ends, or "
                "choose another --out"
            ) from None
        yield


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether this is the reason, however deep in what the libraries made of it."""
    full = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED: No space")
    return error is not None and (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(words in str(error) for words in full)
        or _disk_is_full(error.__cause__ or error.__context__)
    )


def _prepare(folder: RunFolder, paths, config: TrainingConfig, say, texts):
    """Read the text unless an earlier start has; texts: what `gather` gave a new run, else None."""
    from jaxformer.training import prepare

    if not prepare.is_prepared(folder):
        documents, skipped = texts or prepare.gather(paths, config)
        write_run(folder, paths, config)
        say(f"reading {len(documents)} documents ({len(skipped)} skipped) …")
        try:
            prepare.write_data(folder, config, documents, skipped)
        except ValueError:
            if texts:  # refused after all: there is no run
                shutil.rmtree(folder.path)
            raise
    data = prepare.read_data(folder)
    say(f"run folder: {folder.path}   documents: {folder.documents}")
    total = data.train.num_bytes + data.held_out.num_bytes
    for name, stream in (("training", data.train), ("held out", data.held_out)):
        say(
            f"{name}: {stream.num_bytes:,} bytes ({stream.num_bytes / total:.1%}), "
            f"{len(stream.ids):,} tokens, in {stream.num_documents:,} documents"
        )
    return data


def claim(path: Path) -> None:
    """Make the folder, which another start may have done since it was found free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            raise ValueError(f"{path} was taken by another start meanwhile; start again") from None


def fitted(model: DecoderConfig, tokenizer, say) -> DecoderConfig:
    """The config with the vocabulary that was learnt, which a small text leaves below what was
    asked for: an id that stands for no text must not be there to be generated."""
    if tokenizer.vocab_size < model.vocab_size:
        say(
            f"vocabulary: {tokenizer.vocab_size:,} tokens (the text has no more; vocab_size was "
            f"{model.vocab_size:,})"
        )
    return replace(model, vocab_size=tokenizer.vocab_size)


def _report(folder, data, max_length: int, say):
    """The last evaluation beside what general compressors make of the same text."""
    final = [line for line in folder.read_metrics() if "bits_per_byte" in line][-1]
    scores = {"this model": final["bits_per_byte"], **data.baselines}
    say(
        f"held-out text ({data.held_out.num_bytes:,} bytes), bits per byte: "
        + " · ".join(f"{name} {value:.3f}" for name, value in scores.items())
    )
    if samples := folder.read_samples():
        say(f"a sample:\n{samples[-1][1]}")
    say(f"picture: {folder.picture}   samples: {folder.samples}")
    say(f"next: jaxformer generate {shlex.quote(str(folder.path))}{_prompt(data, max_length)}")


def _prompt(data, max_length: int) -> str:
    """The option that makes a model go on from the beginning of its held-out text."""
    tokenizer = data.tokenizer
    text = tokenizer.decode(data.held_out.ids[:200].tolist())
    words = first_words(text, lambda words: len(tokenizer.encode(words)) + 1 < max_length)
    return f" --prompt={shlex.quote(words)}" if words else ""


def first_words(text: str, fits) -> str:
    """The first line's, up to 20 characters, of a text; fewer until they fit."""
    words = "".join(takewhile(str.isprintable, text.lstrip()))
    if len(words) > 20:
        words = words[:20].rpartition(" ")[0].rstrip() or words[:20]
    while words and not fits(words):
        words = words[:-1]
    return words
