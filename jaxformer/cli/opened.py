"""The RUN of a verb, and the devices that the verb computes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from jaxformer.training.config import Mesh


@dataclass(frozen=True)
class RunArguments:
    """What every verb that uses a model takes."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """a run, a saved folder, a folder in Hugging Face's format or a hub id"""
    mesh: Mesh | None = field(default=None, kw_only=True)
    """devices along each axis over which the model is spread, as data=2,tensor=4; None: one"""


@contextmanager
def opened(arguments: RunArguments) -> Iterator:
    """JAX started and its `Checkpoint`, spread over a mesh that is in context, if one is asked
    for."""
    from jaxformer.cli.runtime import start_jax

    start_jax()
    import jax

    from jaxformer.hub.load import load

    if arguments.mesh is None:
        yield load(arguments.run)
        return
    from jaxformer.models.placement import make_mesh

    mesh = make_mesh(asdict(arguments.mesh))
    with jax.set_mesh(mesh):
        yield load(arguments.run, mesh=mesh)
