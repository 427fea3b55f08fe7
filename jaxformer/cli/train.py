"""`jaxformer train [TEXT…] [--model KIND] [--out RUN] [--resume] …`: trains a model."""

import shlex
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, NamedTuple

from jaxformer.artifacts.files import next_free
from jaxformer.artifacts.run import Origin, RunFolder
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.arguments import complete
from jaxformer.cli.checkpoints import Base, open_base, restore_origin, usable_generation
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
from jaxformer.models.config import architecture_name
from jaxformer.models.config.encoder import ReadsSource, check_reads_text
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import spell_flag
from jaxformer.runtime import start_jax
from jaxformer.terminal import say
from jaxformer.training.config import Inputs, MeshSizes, TrainingConfig
from jaxformer.training.data.documents import HUB
from jaxformer.training.fitting import fit_preset
from jaxformer.training.own_names import require_trust
from jaxformer.training.presets import record_training, training_preset
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
    if "" in argv:  # Path("") is the current folder, which the user did not name.
        raise ValueError("an argument is an empty string; omit it or give it a value")
    selection = read_selection(argv)
    resumes = selection.resume and not asks_for_help(argv)
    return _resume(selection, argv) if resumes else _start(selection, argv)


def _resume(selection: Selection, argv: list[str]) -> int:
    """Continues the run in --out or, without --out, the newest unfinished run below runs/."""
    if selection.named_preset is not None:
        raise ValueError("--preset has no effect with --resume: a run keeps its settings")
    if selection.out:
        unfinished, folder = None, RunFolder(selection.out)
    else:
        unfinished = newest_unfinished(RUNS, selection.model)
        folder = unfinished.folder
    inputs, training = read_run(folder)
    require_trust(training.own, bool(selection.trust_code), folder.config)
    kind = architecture_name(training.model)
    if selection.model not in (None, kind):
        raise ValueError(
            f"--model is {selection.model!r}, but the run in {folder.path} has --model {kind}; "
            "omit --model"
        )
    default = TrainArguments(training, kind=kind, preset=selection.preset, out=selection.out)
    given = read_train(argv, default)
    with attributed(training, given, "the run's"):
        arguments = complete(TrainArguments, given, default)
        check_unchanged(folder, training, arguments)
        inputs = inputs._replace(origin=_ignoring(inputs.origin, arguments))
        if unfinished:
            run = f"{folder.path} ({kind}, step {unfinished.step})"
            say(f"resuming {run}, the newest unfinished run")
        return train_run(folder, inputs, arguments, resume=True, base=None)


class NewRun(NamedTuple):
    """A run that a command line describes.

    Attributes:
        arguments: The arguments with their defaults.
        base: The checkpoint of --init-from, or None for fresh parameters.
        name: The default name of the run folder.
        attributed: Function that returns a context manager. An error message inside this context
            names the origin of the value, such as the preset.
    """

    arguments: TrainArguments
    base: Base | None
    name: str
    attributed: Callable[[], AbstractContextManager[None]]


def _start(selection: Selection, argv: list[str]) -> int:
    """Starts a run in a new folder."""
    run = read_new_run(argv, selection)
    with run.attributed():
        folder = RunFolder(run.arguments.out or next_free(RUNS, run.name))
        return train_run(folder, run.arguments.inputs, run.arguments, resume=False, base=run.base)


def read_new_run(argv: list[str], selection: Selection) -> NewRun:
    """Reads the command line of a new run, and checks its settings.

    Args:
        argv: The command-line arguments after `train`.
        selection: The arguments that determine which flags exist.
    """
    model, named, source = selection.model, selection.named_preset, selection.init_from
    trusts = bool(selection.trust_code)
    base = None if source is None else open_base(source, model, named, trusts)
    preset = training_preset(selection.preset, selection.kind) if base is None else base.training
    records = _records_with_prompts(argv)
    if records is not None:
        from jaxformer.training.data.examples import has_preferences

        if base is None:
            raise ValueError(
                f"--init-from is missing: the records of {records} have prompts with answers, "
                "which tune a checkpoint. To train a new model on one of their fields, name the "
                "field with --text-field"
            )
        preset = record_training(
            preset, has_preferences=has_preferences([records]), has_rate=named is not None
        )
        base = base._replace(training=preset)
    kind = architecture_name(preset.model)
    default = TrainArguments(
        preset, init_from=selection.init_from, kind=kind, preset=selection.preset
    )
    given = read_train(argv, default)
    of_run = {name: given[name] for name in field_values(preset) if name in given}
    owner = "the preset's" if base is None else "the checkpoint's"
    explained = partial(attributed, preset, given, owner)
    with explained():
        training = fit_preset(preset, of_run, model_is_fixed=base is not None)
        arguments = complete(TrainArguments, given, replace(default, training=training))
        name = run_name(arguments.inputs, kind, tuned=base is not None)
        return NewRun(arguments, _accepted(base, arguments), name, explained)


def _records_with_prompts(argv: list[str]) -> str | None:
    """Returns the first file on the command line whose records have prompts, or None.

    The records determine the flags of `train`, so this function runs before the flags are parsed.
    With --text-field, records are documents, and the result is None.
    """
    if any(word.split("=")[0] == "--text-field" for word in argv):
        return None
    named = [x for x in argv if x.startswith(HUB) or (x[:1] != "-" and Path(x).exists())]
    if not named:
        return None
    from jaxformer.training.data.examples import needs_tuning

    return next((path for path in named if needs_tuning([path])), None)


def _accepted(base: Base | None, arguments: TrainArguments) -> Base | None:
    """Returns the checkpoint of --init-from without the ignored generation options.

    Raises:
        ValueError: The settings do not match the checkpoint.
    """
    config = arguments.training
    check_reads_text(config.model)
    if base is not None:
        base.accept(config)
    config.own.load(config.model)  # Raises errors before the run writes a file.
    if base is not None:
        return base.ignoring(arguments.ignore_generation_config)
    _check_nothing_ignored(arguments)
    if config.lora.lora_rank is not None:
        raise ValueError(
            f"--lora-rank is {config.lora.lora_rank}, but --init-from is missing: a LoRA adapter "
            "is trained on top of the weights of a checkpoint"
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
    """Raises ValueError if --ignore-generation-config is used without --init-from."""
    if names := arguments.ignore_generation_config:
        raise ValueError(
            f"--ignore-generation-config {names[0]} has no effect here; it needs --init-from, "
            "because only a checkpoint has a generation_config.json"
        )


def _ignoring(origin: Origin | None, arguments: TrainArguments) -> Origin | None:
    """Returns the origin of a resumed run, with the generation settings that its samples use.

    The origin is the checkpoint that the run started from, or None without --init-from.
    """
    if origin is None:
        _check_nothing_ignored(arguments)
        return None
    names = arguments.ignore_generation_config
    return origin._replace(
        generation=usable_generation(origin.generation, names, arguments.training)
    )


def train_run(
    folder: RunFolder, inputs: Inputs, arguments: TrainArguments, resume: bool, base: Base | None
) -> int:
    """Trains in the run folder and returns the exit status.

    `base` is the checkpoint of --init-from, or None for fresh parameters and for resumed runs.
    """
    import jax

    from jaxformer.models.kinds import build
    from jaxformer.training import processes
    from jaxformer.training.log import require_trackers
    from jaxformer.training.loop import Training
    from jaxformer.training.mesh import make_run_mesh
    from jaxformer.training.screen import Screen
    from jaxformer.training.tasks import task_class

    config, params = arguments.training, None
    require_trackers(config.trackers)
    processes.join(arguments.processes)
    first = arguments.processes.coordinator is None or processes.is_first()
    processes.require_same(_shared_settings(config))
    screen, kind = Screen(quiet=not first), task_class(config)
    start_jax()
    mesh = make_run_mesh(config, screen.say)
    mesh_config = _on_mesh(config, mesh)
    if base is not None:
        params, origin = base.read(mesh)
        inputs = inputs._replace(origin=origin)
    with _explained(folder, config), ExitStack() as stack:
        keep = None if base is None else base.keep
        start = partial(prepare_run, folder, inputs, config, screen, stack, resume, keep)
        processes.done_by_first("prepare the run", start)
        task = kind.read(folder, mesh_config)
        for line in task.description():
            screen.say(line)
        if inputs.origin is None:
            config = replace(config, model=fitted(config.model, task.tokenizer, screen.say))
            generation = GenerationDefaults()
        else:  # Samples use the checkpoint's generation settings.
            generation = inputs.origin.generation
            params = restore_origin(folder, inputs.origin, config, mesh) if resume else params
        if first:
            write_run(folder, inputs, config)
        stack.enter_context(nullcontext() if mesh is None else jax.set_mesh(mesh))
        own = config.own.load(config.model)
        model = build(config.model, config.execution, generation=generation, **own)
        task = task.prepare(folder, model, params)
        run = (_on_mesh(config, mesh), folder, task, screen, mesh, params)
        training = Training(*run, model=model, next_step=_resume_command(folder, config))
        if resume:
            training.resume()
        training.run()
    if first:
        _report(folder, config, task, screen.say)
    processes.wait_for_all("the end")
    return 0


@contextmanager
def _explained(folder: RunFolder, config: TrainingConfig) -> Generator[None]:
    """Adds advice to the message of an error that ends the run."""
    from jaxformer.training import processes

    try:
        yield
    except KeyboardInterrupt:
        if folder.holds_run:  # Without a checkpoint, the run cannot continue.
            command = _resume_command(folder, config)
            raise processes.Interrupted(SIGINT, f"interrupted; {command}") from None
        raise
    except Exception as error:
        # JAX raises a RuntimeError if another process has ended or cannot be reached.
        if processes.are_several() and isinstance(error, RuntimeError):
            reason = "another process has ended, or cannot be reached"
            message = f"{reason}; {_resume_command(folder, config)} ({error})"
            processes.leave(message)
        if processes.is_out_of_memory(error):
            raise processes.Ended(
                f"out of memory; reduce --batch-size (or --batch-tokens) and increase "
                f"--gradient-accumulation-steps, or set --remat full ({error})"
            ) from error
        if processes.disk_is_full(error):
            from jaxformer.artifacts.checkpoint import Checkpoints

            last = Checkpoints(folder.checkpoints).last()
            raise OSError(f"the disk is full, so the run stops here; {last}") from error
        raise


def _shared_settings(config: TrainingConfig) -> dict[str, object]:
    """Returns {flag: value} for the settings that must be equal in all processes of a run.

    The dictionary has no paths, because paths may differ between machines.
    """
    from jax import __version__

    flags = {spell_flag(name): x for name, x in field_values(config).items()}
    return {**flags, "--model": architecture_name(config.model), "the version of JAX": __version__}


def _on_mesh(config: TrainingConfig, mesh: "jax.sharding.Mesh | None") -> TrainingConfig:
    """Returns the config with the actual mesh sizes; raises ValueError for an invalid batch size.

    config.json stores the mesh that the user gave, so that the run can continue on other devices.
    """
    return config if mesh is None else replace(config, mesh=MeshSizes(**mesh.shape))


def _resume_command(folder: RunFolder, config: TrainingConfig) -> str:
    """Returns the command that continues a run, for the end of a message."""
    words = ["train", "--resume", "--out", str(folder.path), *_trust_flag(config)]
    return f"continue with: jaxformer {shlex.join(words)}"


def _trust_flag(config: TrainingConfig) -> list[str]:
    """Returns ["--trust-code"] if the run has user-defined functions, and [] otherwise."""
    return ["--trust-code"] if config.own.parts else []


def fitted(model: ModelConfig, tokenizer: Tokenizer, say: Callable[[str], None]) -> ModelConfig:
    """Returns the model config with the vocabulary size of the trained tokenizer.

    A tokenizer trained on a small text has fewer tokens than `model.vocab_size`. With a larger
    vocabulary, the model could generate ids that the tokenizer does not have.

    Args:
        model: The model config.
        tokenizer: The trained tokenizer.
        say: Function that is called with a message if the vocabulary size changes.
    """
    if tokenizer.vocab_size < model.vocab_size:
        say(
            f"vocabulary: {tokenizer.vocab_size:,} tokens (the text is too short for the "
            f"vocab_size {model.vocab_size:,})"
        )
    source = {"source_vocab_size": None} if isinstance(model, ReadsSource) else {}
    return replace(model, vocab_size=tokenizer.vocab_size, **source)


def _report(
    folder: RunFolder, config: TrainingConfig, task: "FileTask", say: Callable[[str], None]
) -> None:
    """Prints the last evaluation, baseline scores on the same text, a sample and file paths."""
    name, label, target = task.measure
    finals = [line[name] for line in folder.read_metrics() if name in line]
    scores = {"this model": finals[-1], **task.baselines} if finals else task.baselines
    say(
        f"score on held-out data ({task.num_targets:,} predicted {target}s), {label}: "
        + " · ".join(f"{who} {value:.3f}" for who, value in scores.items())
    )
    if samples := folder.read_samples():
        say(f"a sample:\n{samples[-1][1]}")
    say(f"picture: {folder.picture}   samples: {folder.samples}")
    verb, *words = task.example()
    command = [verb, str(folder.path), *words, *_trust_flag(config)]
    say(f"next: jaxformer {shlex.join(command)}")
