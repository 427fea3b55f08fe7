"""Training with a user's objective and batches, in the loop of `jaxformer train`."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.artifacts.run import RunFolder, parse_config, parse_kind
from jaxformer.functional.trees import Weights
from jaxformer.models.kinds import build
from jaxformer.models.language_model import Variables
from jaxformer.models.mesh import num_row_parts
from jaxformer.training.batch import AnyBatch
from jaxformer.training.config import RESUMABLE, RunConfig, differences
from jaxformer.training.log import require_trackers
from jaxformer.training.loop import Training
from jaxformer.training.mesh import mesh_of
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
    quiet: bool = False,
) -> Variables:
    """Trains a model with any objective in a run folder, and returns the trained variables.

    If `out` holds a run of the same settings, the run continues from its newest checkpoint. So an
    interrupted script continues when it is run again. The folder has the checkpoints,
    metrics.jsonl and the picture. `jf.load(out)` opens the newest checkpoint, except of a LoRA
    adapter, whose checkpoints lack the base weights.

    Args:
        config: The model, the optimizer and the course of the run.
        objective: What an update reduces.
        batch_of: Returns the batch of update n, from 0, with micro-batches along the first axis
            and rows along the second axis of each array. It must depend on n only, because a
            resumed run asks for the batches that follow. With several processes, each process
            returns the whole batch and trains on its own rows.
        out: The run folder. A new run needs a new or an empty folder.
        held_out: Batches to score at each evaluation, without the axis of micro-batches.
        params: The initial parameters, which are copied; None: random ones.
        quiet: Whether to print nothing.

    Raises:
        ValueError: The objective, a batch or the folder is not accepted. The error comes before
            anything is computed or written.
        Interrupted: A signal ended the run, after a checkpoint was saved.
        Ended: The run diverged.
    """
    check_objective(objective)
    if type(config) is not RunConfig:
        raise ValueError(
            f"config is a {type(config).__name__}; it must be a RunConfig, because the batches are "
            "those of batch_of"
        )
    require_trackers(config.trackers)
    screen = Screen(quiet=quiet or not is_first())
    if config.lora.lora_rank is not None and params is None:
        raise ValueError(f"lora_rank is {config.lora.lora_rank}, but params is None; give weights")
    mesh, folder = mesh_of(config, screen.say), RunFolder(out)
    with nullcontext() if mesh is None else jax.set_mesh(mesh), ExitStack() as locks:
        _check_batch(config, objective, batch_of(0), params, mesh)
        prepare = partial(_prepare, folder, config, objective, screen, locks)
        done_by_first("the run folder is ready", prepare)
        task = OwnBatches(objective, batch_of, held_out)
        base = jax.tree.map(jnp.copy, params)
        go_on = "run the script again to continue"
        training = Training(config, folder, task, screen, mesh, base, next_step=go_on)
        if folder.metrics.exists():
            training.resume()
        training.run()
        wait_for_all("the end")
        return {"params": training.state.weights()}


def _check_batch(
    config: RunConfig,
    objective: Objective[AnyBatch],
    batch: AnyBatch,
    params: Weights | None,
    mesh: Mesh | None,
) -> None:
    """Traces an update with the shapes of a batch, which checks the batch and the objective.

    Raises:
        ValueError: They are not accepted, or the mesh does not divide the rows.
    """
    model, optimizer = build(config.model, config.execution), make_optimizer(config.optimizer)
    init = partial(init_state, model, optimizer, 0, lora=config.lora)
    jax.eval_shape(make_step(model, optimizer, objective), jax.eval_shape(init, params), batch)
    parts = 1 if mesh is None else num_row_parts(mesh)
    shapes = [x.shape for x in jax.tree.leaves(batch)]
    if any(len(shape) < 2 or shape[1] % parts for shape in shapes):
        raise ValueError(
            f"batch has arrays of shapes {', '.join(map(str, shapes))}; each must have rows along "
            "its second axis, and their number must be a multiple of data × fsdp × expert "
            f"({parts})"
        )


def _prepare(
    folder: RunFolder, config: RunConfig, objective: Objective, screen: Screen, locks: ExitStack
) -> None:
    """Creates and locks a new run folder, or checks that the run in it has the same settings."""
    # The addresses of functions differ from process to process.
    named = re.sub(r" at 0x[0-9a-f]+", "", repr(objective))
    if folder.holds_run:
        _check_same(folder, config, named)
    else:
        check_free(folder)
        claim(folder)
    hold_lock(folder, screen.say, locks)
    folder.write_config({**config_sections(config), "objective": named})


def _check_same(folder: RunFolder, config: RunConfig, objective: str) -> None:
    """Raises ValueError unless the run in the folder has this objective and these settings."""
    for name, then, now in _settings(folder, config, objective):
        if then != now and name not in RESUMABLE:
            raise ValueError(
                f"{name} is {now}, but the run in {folder.path} was started with {then}; keep it, "
                "or choose another folder as `out`"
            )


def _settings(
    folder: RunFolder, config: RunConfig, objective: str
) -> Iterator[tuple[str, object, object]]:
    """Yields (name, value in the folder, value now) of settings.

    Stop at the first difference, because the settings after it cannot be compared.
    """
    sections = folder.read_config("model", "training")
    yield "objective", sections.get("objective", "that of jaxformer train"), objective
    model = parse_kind(sections, folder.config)
    yield "model", type(model).__name__, type(config.model).__name__
    old = parse_config(RunConfig, {**sections["training"], "model": model}, folder.config)
    for name, (then, now) in differences(old, config).items():
        yield name, then, now
