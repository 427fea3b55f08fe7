"""`jaxformer doctor`: what is here, and what a model needs of machines that are not."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

import tyro

from jaxformer.cli.arguments import parse
from jaxformer.models.config import KINDS, Execution
from jaxformer.training.config import Mesh, MeshSizes
from jaxformer.training.doctor.machines import Target, parse_target, start_for
from jaxformer.training.presets import kinds_of, training_preset


@dataclass(frozen=True)
class DoctorArguments:
    """What is here: devices, versions, memory, and what is missing. With --preset: compile the
    training step of a model, or --decode its decoding loop, for a machine that need not be here,
    and tell what it needs."""

    preset: str | None = None
    """a model or a whole run by name"""
    model: str | None = None
    """kind of the preset, where it has several"""
    target: str | None = None
    """machine: gpu:h100:8, tpu:v5e:4x4, cpu:8; None: cpu, as many devices as the mesh has"""
    mesh: Mesh | None = None
    """devices by axis: data=2,fsdp=4; None: data=N for all of the target"""
    batch_size: int | None = None
    """rows of the whole batch; None: 8 for each device that shares it"""
    length: int | None = None
    """tokens of a row; None: the model's max_length"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """type of activations; None: bfloat16, on a CPU float32"""
    execution: Execution = field(default_factory=Execution)
    decode: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """the decoding loop, not the training step"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object and nothing else"""

    def __post_init__(self):
        for name in ("batch_size", "length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.model not in (None, *KINDS):
            raise ValueError(f"model is {self.model!r}; it must be one of {', '.join(KINDS)}")
        given = [x for x in ("target", "mesh", "batch_size", "length") if getattr(self, x)]
        if self.preset is None and (given or self.decode):
            asked = f"--{given[0].replace('_', '-')}" if given else "--decode"
            raise ValueError(f"{asked} was given without --preset, the model that it is for")


def main(argv: list[str]) -> int:
    """Look, or compile; print."""
    arguments = parse(DoctorArguments, "doctor", argv)
    if arguments.preset is None:
        from jaxformer.cli.here import lines_of, what_is_here

        found = what_is_here()
        _show("jaxformer doctor", found, lines_of(found), arguments.json)
        return 0
    config, target, mesh, rows, length = _asked(arguments)
    start_for(target)
    from jaxformer.cli.needs import lines_of_decoding, lines_of_step
    from jaxformer.training.doctor.examine import examine_decoding, examine_step

    examine, lines = (
        (examine_decoding, lines_of_decoding) if arguments.decode else (examine_step, lines_of_step)
    )
    found = examine(config, arguments.execution, target, asdict(mesh), rows, length)
    found = {"preset": arguments.preset, **found}
    _show(f"{arguments.preset} on {target}", found, lines(found), arguments.json)
    return 0 if found["memory"]["fits"] is not False else 1


def _asked(arguments: DoctorArguments):
    """(config, target, mesh, rows, tokens of a row), before JAX is started."""
    kinds = kinds_of(arguments.preset)
    kind = arguments.model or (kinds[0] if kinds else "decoder")
    config = training_preset(arguments.preset, kind).model
    mesh = arguments.mesh
    if arguments.target is None:
        target = Target("cpu", (1 if mesh is None else mesh.parts * mesh.tensor,))
    else:
        target = parse_target(arguments.target)
    mesh = mesh or MeshSizes(data=target.count)
    dtype = arguments.dtype or ("float32" if target.platform == "cpu" else "bfloat16")
    length = arguments.length or config.max_length
    if length > config.max_length:
        raise ValueError(f"length is {length}; {arguments.preset} has {config.max_length} at most")
    rows = arguments.batch_size or 8 * mesh.parts
    return replace(config, dtype=dtype), target, mesh, rows, length


def _show(title: str, found: dict, lines: list[tuple[str, ...]], as_json: bool) -> None:
    """One table, or one object."""
    if as_json:
        print(json.dumps(found))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column == 0, overflow="fold")
    for line in lines:
        if line:
            table.add_row(*map(Text, line))
        else:
            table.add_section()
    Console().print(table)
