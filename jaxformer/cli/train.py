"""`jaxformer train [TEXT…] [--model KIND] [--out RUN] [--resume] …`: trains a model."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from jaxformer.artifacts.files import next_free
from jaxformer.artifacts.run import Origin, RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import complete
from jaxformer.cli.checkpoints import Base, open_base, origin_of, usable_generation
from jaxformer.cli.flags import field_values
from jaxformer.cli.help import asks_for_help
from jaxformer.cli.train_arguments import (
    Selection,
    TrainArguments,
    attributed,
    check_unchanged,
    read_selection,
    read_train,
)
from jaxformer.models.config import kind_of
from jaxformer.models.config.encoder import ReadsSource
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import flag_of
from jaxformer.runtime import start_jax
from jaxformer.terminal import say
from jaxformer.training.config import Inputs, MeshSizes, TrainingConfig
from jaxformer.training.fitting import fit_preset
from jaxformer.training.presets import training_preset
from jaxformer.training.run_folders import (
    newest_unfinished,
    prepare_run,
    read_run,
    run_name,
    write_run,
)

if TYPE_CHECKING:
    import jax

    from jaxformer.training.tasks.task import FileTask

RUNS = Path("runs")


def main(argv: list[str]) -> int:
    """Parses the arguments, prepares the run folder and trains."""
    if "" in argv:  # Path("") would be the current folder
        raise ValueError("an argument is empty")
    selection = read_selection(argv)
    resumes = selection.resume and not asks_for_help(argv)
    return _resume(selection, argv) if resumes else _start(selection, argv)


def _resume(selection: Selection, argv: list[str]) -> int:
    """Continues the run in --out or, without it, the newest unfinished run below runs/."""
    if selection.named_preset is not None:
        raise ValueError("--preset has no effect with --resume: a run keeps its settings")
    if selection.out:
        unfinished, folder = None, RunFolder(selection.out)
    else:
        unfinished = newest_unfinished(RUNS, selection.model)
        folder = unfinished.folder
    inputs, training = read_run(folder)
    kind = kind_of(training.model)
    if selection.model not in (None, kind):
        raise ValueError(f"--model is {selection.model!r}, but {folder.path} is of kind {kind}")
    default = TrainArguments(training, kind=kind, preset=selection.preset, out=selection.out)
    given = read_train(argv, default)
    with attributed(training, given, "the run's"):
        arguments = complete(TrainArguments, given, default)
        check_unchanged(folder, training, arguments)
        inputs = inputs._replace(origin=_ignoring(inputs.origin, arguments))
        if unfinished:
            run = f"{folder.path} ({kind}, step {unfinished.step})"
            say(f"resuming {run}, the newest unfinished run")
        return _train(folder, inputs, arguments, resume=True, base=None)


def _start(selection: Selection, argv: list[str]) -> int:
    """Starts a run in a new folder."""
    model, named, source = selection.model, selection.named_preset, selection.base
    base = None if source is None else open_base(source, model, named)
    preset = training_preset(selection.preset, selection.kind) if base is None else base.training
    kind = kind_of(preset.model)
    default = TrainArguments(preset, base=selection.base, kind=kind, preset=selection.preset)
    given = read_train(argv, default)
    of_run = {name: given[name] for name in field_values(preset) if name in given}
    with attributed(preset, given, "the preset's" if base is None else "the checkpoint's"):
        training = fit_preset(preset, of_run, model_is_fixed=base is not None)
        arguments = complete(TrainArguments, given, replace(default, training=training))
        name = run_name(arguments.inputs, kind, tuned=base is not None)
        folder = RunFolder(arguments.out or next_free(RUNS, name))
        base = _accepted(base, arguments)
        return _train(folder, arguments.inputs, arguments, resume=False, base=base)


def _accepted(base: Base | None, arguments: TrainArguments) -> Base | None:
    """Returns the checkpoint of --from without the options that the arguments ignore.

    Raises:
        ValueError: Settings do not match the initial parameters of the run.
    """
    config = arguments.training
    if base is not None:
        base.accept(config)
        return base.ignoring(arguments.ignore_generation_config)
    _check_nothing_ignored(arguments)
    if config.lora.lora_rank is not None:
        raise ValueError(
            f"--lora-rank is {config.lora.lora_rank}, but --from is missing: a LoRA adapter is "
            "trained on top of the weights of a checkpoint"
        )
    model = config.model
    if labels := getattr(model, "num_labels", 0):
        raise ValueError(
            f"--num-labels is {labels}, but it must be 0: training on masked tokens does not train "
            "a classifier"
        )
    if isinstance(model, ReadsSource) and model.source_vocab_size not in (None, model.vocab_size):
        raise ValueError(
            f"source_vocab_size is {model.source_vocab_size}; it must be vocab_size "
            f"({model.vocab_size}), since one tokenizer is trained for both sides"
        )
    return None


def _check_nothing_ignored(arguments: TrainArguments) -> None:
    """Raises ValueError for --ignore-generation-config in a run without a checkpoint."""
    if names := arguments.ignore_generation_config:
        raise ValueError(
            f"--ignore-generation-config {names[0]} has no effect here; it needs --from, because "
            "only a checkpoint has a generation_config.json"
        )


def _ignoring(origin: Origin | None, arguments: TrainArguments) -> Origin | None:
    """Returns the origin of a resumed run with the settings for its samples."""
    if origin is None:
        _check_nothing_ignored(arguments)
        return None
    names = arguments.ignore_generation_config
    return origin._replace(
        generation=usable_generation(origin.generation, names, arguments.training)
    )


def _train(
    folder: RunFolder, inputs: Inputs, arguments: TrainArguments, resume: bool, base: Base | None
) -> int:
    """Trains in the run folder and returns the exit status.

    `base` is the `Base` of a new run; None: the run starts from fresh parameters or is resumed.
    """
    import jax

    from jaxformer.training import processes
    from jaxformer.training.log import require_trackers
    from jaxformer.training.loop import Training
    from jaxformer.training.mesh import mesh_of
    from jaxformer.training.screen import Screen
    from jaxformer.training.tasks import task_of

    config, params = arguments.training, None
    require_trackers(config.trackers)
    processes.join(arguments.processes)
    first = arguments.processes.coordinator is None or processes.is_first()
    processes.require_same(_shared_settings(config))
    screen, kind = Screen(quiet=not first), task_of(config)
    start_jax()
    mesh = mesh_of(config, screen.say)
    mesh_config = _on_mesh(config, mesh)
    if base is not None:
        params, origin = base.read(mesh)
        inputs = inputs._replace(origin=origin)
    with _explained(folder), ExitStack() as stack:
        keep = None if base is None else base.keep
        start = partial(prepare_run, folder, inputs, config, screen, stack, resume, keep)
        processes.done_by_first("the text is read", start)
        task = kind.read(folder, mesh_config)
        for line in task.description():
            screen.say(line)
        options = {}
        if inputs.origin is None:
            config = replace(config, model=fitted(config.model, task.tokenizer, screen.say))
        else:  # samples are generated with its settings
            options = {"generation": inputs.origin.generation}
            params = origin_of(folder, inputs.origin, config, mesh) if resume else params
        if first:
            write_run(folder, inputs, config)
        stack.enter_context(nullcontext() if mesh is None else jax.set_mesh(mesh))
        run = (_on_mesh(config, mesh), folder, task, screen, mesh, params)
        training = Training(*run, next_step=_go_on(folder), **options)
        if resume:
            training.resume()
        training.run()
    if first:
        _report(folder, task, screen.say)
    processes.wait_for_all("the end")
    return 0


@contextmanager
def _explained(folder: RunFolder) -> Iterator[None]:
    """Adds to an error that ends the run what can be done about it."""
    from jaxformer.training import processes

    try:
        yield
    except KeyboardInterrupt:
        if folder.holds_run:  # otherwise there is nothing to continue
            raise processes.Interrupted(SIGINT, f"interrupted; {_go_on(folder)}") from None
        raise
    except Exception as error:
        if processes.are_several() and isinstance(error, RuntimeError):  # raised by JAX's runtime
            message = f"another process has ended, or cannot be reached; {_go_on(folder)} ({error})"
            processes.leave(message)
        if processes.is_out_of_memory(error):
            raise processes.Ended(
                f"out of memory; reduce --batch-size (or --batch-tokens) and increase "
                f"--accumulate, or set --remat full ({error})"
            ) from error
        if processes.disk_is_full(error):
            from jaxformer.artifacts.checkpoint import Checkpoints

            last = Checkpoints(folder.checkpoints).last()
            raise OSError(f"the disk is full, so the run stops here; {last}") from error
        raise


def _shared_settings(config: TrainingConfig) -> dict[str, object]:
    """Returns the settings that must be the same in all processes of a run, by flag.

    Paths are not among them, because they may differ between machines.
    """
    from jax import __version__

    flags = {flag_of(name): x for name, x in field_values(config).items()}
    return {**flags, "--model": kind_of(config.model), "the version of JAX": __version__}


def _on_mesh(config: TrainingConfig, mesh: "jax.sharding.Mesh | None") -> TrainingConfig:
    """Returns the config with the sizes of the actual mesh; raises ValueError for a bad batch size.

    config.json stores the mesh that the user gave, so that the run can continue on other devices.
    """
    return config if mesh is None else replace(config, mesh=MeshSizes(**mesh.shape))


def _go_on(folder: RunFolder) -> str:
    """Returns the command that continues a run, as the end of a message."""
    return f"continue with: jaxformer train --resume --out {shlex.quote(str(folder.path))}"


def fitted(model: ModelConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> ModelConfig:
    """Returns the model config with the vocabulary size of the trained tokenizer.

    A small text yields fewer tokens than configured. Without this, the model could generate ids
    that stand for no text.

    Args:
        model: The model config.
        tokenizer: The trained tokenizer.
        say: Receives a message if the size changes.
    """
    if tokenizer.vocab_size < model.vocab_size:
        say(
            f"vocabulary: {tokenizer.vocab_size:,} tokens (the text yields no more; vocab_size was "
            f"{model.vocab_size:,})"
        )
    source = {"source_vocab_size": None} if isinstance(model, ReadsSource) else {}
    return replace(model, vocab_size=tokenizer.vocab_size, **source)


def _report(folder: RunFolder, task: "FileTask", say: Callable[[str], None]) -> None:
    """Prints the last evaluation, scores of baselines on the same text, a sample and the paths."""
    name, label = task.measure
    finals = [line[name] for line in folder.read_metrics() if name in line]
    scores = {"this model": finals[-1], **task.baselines} if finals else task.baselines
    say(
        f"score on held-out text ({task.num_targets:,} predicted tokens), {label}: "
        + " · ".join(f"{who} {value:.3f}" for who, value in scores.items())
    )
    if samples := folder.read_samples():
        say(f"a sample:\n{samples[-1][1]}")
    say(f"picture: {folder.picture}   samples: {folder.samples}")
    verb, *words = task.example()
    say(f"next: jaxformer {shlex.join([verb, str(folder.path), *words])}")
