"""Training with a user's objective and batches, in the training loop of `jaxformer train`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind
from jaxformer.artifacts.saved import OWN, own_values
from jaxformer.artifacts.values import described, difference, to_json
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.trees import Weights
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sharding.parameters import num_batch_shards
from jaxformer.terminal import kind_of
from jaxformer.training.batch import AnyBatch
from jaxformer.training.config import RESUMABLE, RunConfig, differences
from jaxformer.training.log import require_trackers
from jaxformer.training.loop import Training
from jaxformer.training.mesh import make_run_mesh
from jaxformer.training.objectives import Objective, check_objective
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.processes import done_by_first, is_first, wait_for_all
from jaxformer.training.run_folders import check_free, claim, config_sections, hold_lock
from jaxformer.training.screen import Screen
from jaxformer.training.step import init_state, make_step
from jaxformer.training.tasks.own_batches import OwnBatches


def fit(
    config: RunConfig,
    objective: Objective[AnyBatch],
    batch_of: Callable[[int], AnyBatch],
    out: str | Path,
    *,
    held_out: Sequence[AnyBatch] = (),
    params: Weights | None = None,
    mask: Any = None,
    layers: tuple[Layer, ...] | None = None,
    activation: Callable[..., Any] | None = None,
    positions: Any = None,
    quiet: bool = False,
) -> Variables:
    """Trains a model with any objective in a run folder, and returns the trained variables.

    If `out` contains a run with the same settings, training continues from its newest checkpoint.
    To resume an interrupted script, run the script again. The folder contains the checkpoints,
    metrics.jsonl, the loss curve and config.json. config.json stores the objective's class and
    fields. `jf.load(out)` opens the newest checkpoint. LoRA adapters cannot be opened, because
    their checkpoints lack the base weights.

    Args:
        config: The model, the optimizer and the settings of the run.
        objective: The quantity that training minimizes.
        batch_of: Returns the batch of update n, counted from 0. The axes of each array are
            (micro-batches, batch, …). The batch must be a function of n alone, because a resumed
            run continues with the next n. With several processes, `batch_of` must return the
            whole batch in every process. Each process then trains on its own shard.
        out: The run folder. A new run needs a new or an empty folder.
        held_out: Batches to score at each evaluation, without the axis of micro-batches.
        params: The initial parameters, which are copied; random parameters if None.
        mask: The mask of the model; see `LanguageModel`.
        layers: The layers of the model; see `LanguageModel`.
        activation: The activation of the model; see `LanguageModel`.
        positions: The positions of the model; see `LanguageModel`.
        quiet: Whether to print nothing.

    Raises:
        ValueError: The objective, a batch or the folder is not accepted. This error is raised
            before any update and before any file is written.
        Interrupted: A signal ended the run, after a checkpoint was saved.
        Ended: The loss or the gradient diverged.
    """
    check_objective(objective)
    if type(config) is not RunConfig:
        raise ValueError(
            f"config is {kind_of(config)}; it must be a RunConfig, because batch_of "
            "replaces the data settings"
        )
    require_trackers(config.trackers)
    screen = Screen(quiet=quiet or not is_first())
    if config.lora.lora_rank is not None and params is None:
        raise ValueError(
            f"lora_rank is {config.lora.lora_rank}, but params is None; pass the base weights as "
            "params"
        )
    mesh, folder = make_run_mesh(config, screen.say), RunFolder(out)
    with nullcontext() if mesh is None else jax.set_mesh(mesh), ExitStack() as locks:
        model = build(
            config.model,
            config.execution,
            mask=mask,
            layers=layers,
            activation=activation,
            positions=positions,
        )
        own = {"objective": to_json(objective, "objective"), **own_values(model)}
        _check_batch(model, config, objective, batch_of(0), params, mesh)
        prepare = partial(_prepare, folder, config, own, screen, locks)
        done_by_first("the run folder is ready", prepare)
        task = OwnBatches(objective, batch_of, held_out)
        base = jax.tree.map(jnp.copy, params)
        next_step = "to continue, run the same script again"
        training = Training(
            config, folder, task, screen, mesh, base, model=model, next_step=next_step
        )
        if folder.metrics.exists():
            training.resume()
        training.run()
        wait_for_all("the end")
        return {"params": training.state.weights()}


def _check_batch(
    model: LanguageModel,
    config: RunConfig,
    objective: Objective[AnyBatch],
    batch: AnyBatch,
    params: Weights | None,
    mesh: Mesh | None,
) -> None:
    """Checks the batch and the objective by tracing an update with the batch's shapes.

    Raises:
        ValueError: The batch or the objective is not accepted, or the batch size is not divisible
            by the mesh's number of batch shards.
    """
    optimizer = make_optimizer(config.optimizer)
    init = partial(init_state, model, optimizer, 0, lora=config.lora)
    jax.eval_shape(make_step(model, optimizer, objective), jax.eval_shape(init, params), batch)
    parts = 1 if mesh is None else num_batch_shards(mesh)
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    if any(len(shape) < 2 or shape[1] % parts for shape in shapes):
        raise ValueError(
            f"batch has arrays of shapes {', '.join(map(str, shapes))}; the second axis of each "
            "must be the batch, with a size divisible by data × fsdp × expert "
            f"({parts})"
        )


def _prepare(
    folder: RunFolder, config: RunConfig, own: dict[str, Any], screen: Screen, locks: ExitStack
) -> None:
    """Creates a new run folder, or checks an existing run's settings, and locks the folder.

    Args:
        folder: The run folder.
        config: The settings of the run.
        own: The objective and the user's parts of the model, as JSON.
        screen: Shows messages.
        locks: Exit stack. Closing the stack releases the lock of the folder.
    """
    if folder.holds_run:
        _check_same(folder, config, own)
    else:
        check_free(folder)
        claim(folder)
    hold_lock(folder, screen.say, locks)
    folder.write_config({**config_sections(config), **own})


def _check_same(folder: RunFolder, config: RunConfig, own: dict[str, Any]) -> None:
    """Raises ValueError unless the run in the folder has the same settings."""
    for name, then, now in _settings(folder, config, own):
        if then != now:
            raise ValueError(
                f"{name} is {now}, but the run in {folder.path} was started with {then}; restore "
                "the old value, or choose another folder as `out`"
            )


def _settings(
    folder: RunFolder, config: RunConfig, own: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yields (name, value in config.json, new value) for each setting that must not change.

    The caller must stop at the first difference, because later settings may then not be comparable.
    """
    sections = folder.read_config("model", "training")
    if "objective" not in sections:
        yield "objective", "the objective of jaxformer train", described(own["objective"])
    for name in ("objective", *OWN):
        if found := difference(name, sections.get(name), own.get(name)):
            yield found
    model = parse_kind(sections, folder.config)
    yield "model", type(model).__name__, type(config.model).__name__
    old = parse_config(RunConfig, {**sections["training"], "model": model}, folder.config)
    for name, (then, now) in differences(old, config).items():
        if name not in RESUMABLE:
            yield name, then, now
