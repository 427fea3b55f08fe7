"""`jaxformer sweep --vary FLAG=A,B,… [flags of train]`: trains and compares several runs."""

import re
import shlex
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxformer.artifacts.files import json_text, next_free, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.cli.arguments import complete, read_given, read_values, take
from jaxformer.cli.flags import Switch, list_flags
from jaxformer.cli.help import asks_for_help
from jaxformer.cli.train import RUNS, NewRun, fitted, read_new_run, train_run
from jaxformer.cli.train_arguments import read_selection
from jaxformer.models.config.needs import Spelling
from jaxformer.runtime import one_device_per_core, start_jax
from jaxformer.terminal import say
from jaxformer.training.config import RecordTraining, TextTraining

if TYPE_CHECKING:
    from jaxformer.training.screen import Screen
    from jaxformer.training.sweep import Planned, Setting

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class SweepArguments:
    """Train a model once for each combination of settings, and compare the runs.

    All flags of `jaxformer train` apply to all runs. Runs that differ only in the seed and the
    learning rate are trained in one program. If the same command is repeated with --out, the sweep
    continues where it ended.
    """

    vary: Annotated[tuple[str, ...], Spelling(placeholder="FLAG=A,B,…", is_repeated=True)] = ()
    """flag of train and its values, such as seed=0..4, learning-rate=0.001,0.003 or norm=rms,layer;
    may be repeated: the sweep has a run for each combination"""
    list: Path | None = None
    """file with the flags of one setting in each line, such as --num-layers 4 --embed-dim 128;
    each line is combined with each value of --vary"""
    out: Path | None = None
    """folder of the sweep; default: runs/NAME-sweep, where NAME comes from the text"""
    together: int | None = None
    """largest number of runs in one program; default: all runs that differ only in the seed and the
    learning rate"""
    score_all: Switch = False
    """score all held-out data at the end of each run, as train does; without this flag, runs of one
    program are scored on the part of the held-out data that their other evaluations use"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.together is not None and self.together < 1:
            raise ValueError(f"--together is {self.together}; it must be at least 1")


def main(argv: list[str]) -> int:
    """Trains the runs of the sweep, draws the picture and prints the comparison."""
    flags = list_flags(SweepArguments)
    if asks_for_help(argv):
        read_given(SweepArguments, "sweep", argv)
    words, command = take(flags, argv)
    arguments = complete(SweepArguments, read_values(flags, words))
    if not arguments.vary and arguments.list is None:
        raise ValueError("--vary is missing; give a flag and its values: --vary seed=0..4")
    from jaxformer.training.screen import Screen
    from jaxformer.training.sweep import Planned, claim_sweep, folder_name, grid, withdraw

    varied = dict(map(_values, arguments.vary))
    if len(varied) < len(arguments.vary):
        raise ValueError("--vary has a flag twice; give all its values in one --vary")
    settings = grid(varied, _listed(arguments.list))
    new = [_read(command, setting) for setting in settings]
    out = arguments.out or next_free(RUNS, f"{new[0].name}-sweep")
    created = claim_sweep(out, command, settings)
    runs = [
        Planned(setting, RunFolder(out / folder_name(setting)), of.inputs, of.training)
        for setting, of in zip(settings, (run.arguments for run in new), strict=True)
    ]
    begun = {run.folder.path: of_run for run, of_run in zip(runs, new, strict=True)}
    screen = Screen(quiet=arguments.json)
    try:
        _prepare(runs, begun, screen)
    except ValueError:
        withdraw(created)
        raise
    _train(out, runs, begun, screen, arguments)
    return _report(out, runs, arguments)


def _values(word: str) -> tuple[str, list[str]]:
    """Reads FLAG=A,B,… and returns the flag and its values."""
    name, equals, text = word.partition("=")
    name = name.lstrip("-").replace("_", "-")
    if not equals or not name or not text:
        raise ValueError(f"--vary is {word!r}; write it as FLAG=A,B,…, such as seed=0,1,2")
    if spans := _RANGE.fullmatch(text):
        first, last = map(int, spans.groups())
        if last < first:
            raise ValueError(f"--vary is {word!r}; the range must not be empty")
        return name, [str(number) for number in range(first, last + 1)]
    return name, text.split(",")


def _listed(path: Path | None) -> list["Setting"]:
    """Reads the settings of --list, one from each line."""
    if path is None:
        return []
    settings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = shlex.split(line, comments=True)
        setting: Setting = {}
        for word in words:
            if word.startswith("--"):
                name, _, value = word.removeprefix("--").partition("=")
                setting[name.replace("_", "-")] = value
            elif not setting:
                raise ValueError(f"{path}, line {number}: {word!r} must follow a flag")
            else:
                name = [*setting][-1]
                setting[name] = f"{setting[name]} {word}".strip()
        settings += [setting] * bool(setting)
    if not settings:
        raise ValueError(f"{path} has no settings; write the flags of a setting in each line")
    return settings


def _read(command: list[str], setting: "Setting") -> NewRun:
    """Reads the command line of one run."""
    given = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in command}
    if both := given & setting.keys():
        raise ValueError(f"--{min(both)} has a value and is also varied; give it in one place")
    if "coordinator" in given | setting.keys():
        raise ValueError("--coordinator has no effect in a sweep, which is one process; omit it")
    argv = [*command]
    for name, value in setting.items():
        flag = f"--no-{name}" if value == "False" else f"--{name}"
        argv += [flag, *value.split()] if value not in ("True", "False") else [flag]
    selection = read_selection(argv)
    if selection.resume or selection.out:
        raise ValueError("--resume and --out belong to a single run; omit them")
    try:
        run = read_new_run(argv, selection)
    except ValueError as error:
        from jaxformer.training.sweep import said

        raise ValueError(f"{error} (with {said(setting)})") from error
    training = run.arguments.training
    writes_samples = isinstance(training, TextTraining | RecordTraining)
    if writes_samples and "sample-tokens" not in given | setting.keys():
        # To generate sample texts for many runs would take long.
        arguments = replace(run.arguments, training=replace(training, sample_tokens=0))
        return run._replace(arguments=arguments)
    return run


def _prepare(runs: list["Planned"], begun: dict[Path, NewRun], screen: "Screen") -> None:
    """Writes the data of all runs without a checkpoint; runs with equal data share their files."""
    from jaxformer.training.sweep import prepare

    ready: dict[Any, RunFolder] = {}
    for run in runs:
        if begun[run.folder.path].base is None:
            prepare(run, ready.get(run.data_key()), screen)
            ready.setdefault(run.data_key(), run.folder)


def _train(
    out: Path,
    runs: list["Planned"],
    begun: dict[Path, NewRun],
    screen: "Screen",
    arguments: SweepArguments,
) -> None:
    """Trains all runs that are not done."""
    from jaxformer.training.group import shared_settings
    from jaxformer.training.run_folders import checkpoint_step
    from jaxformer.training.sweep import groups

    if all(begun[run.folder.path].base is None and shared_settings(run.config) for run in runs):
        one_device_per_core()
    start_jax()

    def key(run: "Planned") -> Any:
        shared, step = shared_settings(run.config), checkpoint_step(run.folder)
        if begun[run.folder.path].base is not None or shared is None:
            return None
        return shared, run.inputs, step

    left = [run for run in runs if not run.is_done]
    screen.say(f"{out}: {len(runs)} runs, {len(runs) - len(left)} of them complete")
    next_step = f"to continue, repeat the command with --out {shlex.quote(str(out))}"
    for group in groups(left, key, arguments.together):
        if key(group[0]) is not None:
            _train_group(group, screen, next_step, scores_all=arguments.score_all)
        else:
            _train_alone(group[0], begun[group[0].folder.path], arguments)


def _train_group(
    runs: list["Planned"], screen: "Screen", next_step: str, *, scores_all: bool
) -> None:
    """Trains runs in one program."""
    from jaxformer.models.kinds import build
    from jaxformer.training.group import Member, RunGroup
    from jaxformer.training.log import require_trackers
    from jaxformer.training.processes import Ended, is_out_of_memory
    from jaxformer.training.run_folders import hold_lock, write_run
    from jaxformer.training.tasks import task_class

    require_trackers(runs[0].config.trackers)
    with ExitStack() as stack:
        members = []
        for folder, inputs, config in (run[1:] for run in runs):
            hold_lock(folder, screen.say, stack)
            task = task_class(config).read(folder, config)
            say_once = screen.say if not members else lambda text: None
            config = replace(config, model=fitted(config.model, task.tokenizer, say_once))
            write_run(folder, inputs, config)
            members.append(Member(config, folder, task))
        config = members[0].config
        model = build(config.model, config.execution, **config.own.load(config.model))
        group = RunGroup(members, model, screen, next_step, scores_all=scores_all)
        group.resume()
        try:
            group.run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise Ended(f"out of memory; set --together below {len(runs)} ({error})") from error


def _train_alone(run: "Planned", new: NewRun, arguments: SweepArguments) -> None:
    """Trains a run in a program of its own, as `jaxformer train` does."""
    from jaxformer.training.processes import Ended, Interrupted

    resumes = run.folder.holds_run
    of_run = replace(new.arguments, training=run.config)
    # --json prints one JSON object and nothing else.
    shown = redirect_stdout(sys.stderr) if arguments.json else nullcontext()
    with shown, new.attributed():
        try:
            train_run(
                run.folder, run.inputs, of_run, resume=resumes, base=None if resumes else new.base
            )
        except Interrupted:
            raise
        except Ended as error:
            say(f"{run.folder.path.name} ended early: {error}", sys.stderr)


def _report(out: Path, runs: list["Planned"], arguments: SweepArguments) -> int:
    """Draws sweep.png, writes results.json and prints the table."""
    from jaxformer.training.sweep_results import averages, draw_sweep, table

    found = averages(runs)
    picture = out / "sweep.png"
    draw_sweep(found, picture)
    content = {"picture": str(picture), "settings": [x.as_json() for x in found]}
    write_whole(out / "results.json", json_text(content, indent=2) + "\n")
    if arguments.json:
        say(json_text(content))
        return 0
    for line in table(found):
        say(line)
    say(f"picture: {picture}   numbers: {out / 'results.json'}")
    return 0
