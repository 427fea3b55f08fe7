"""Dataclasses from the command line, by tyro, with its errors brought down to one line."""

import io
import json
import re
from contextlib import redirect_stderr
from dataclasses import fields
from typing import TypeVar

T = TypeVar("T")


class UsageError(Exception):
    """The command line could not be understood; the message is one line."""


def parse(kind: type[T], verb: str, argv: list[str], default: T | None = None) -> T:
    """An instance of the dataclass `kind`; nested fields are flags of their own names."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_scaling_rule)
    registry.primitive_rule(_mesh_rule)
    said = io.StringIO()
    defaults = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=f"jaxformer {verb}",
                args=argv,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=registry,
                **defaults,
            )
    except SystemExit as stop:
        if stop.code:
            raise UsageError(_one_line(said.getvalue())) from None
        raise


def _scaling_rule(info):
    """A RotaryScaling is one word, kind,field=value,…: yarn,factor=4,original_length=4096."""
    import tyro

    from jaxformer.models.config.rotary import RotaryScaling, Scaling

    if info.type is not Scaling:
        return None

    def read(words):
        kind, *fields = words[0].split(",")
        pairs = [field.split("=", 1) for field in fields]
        if any(len(pair) < 2 for pair in pairs):
            raise ValueError(f"{words[0]!r}: after the kind each field is NAME=VALUE")
        return RotaryScaling(kind, **{name: json.loads(value) for name, value in pairs})

    def write(scaling):
        given = [(x.name, getattr(scaling, x.name)) for x in fields(scaling) if x.name != "kind"]
        return [",".join([scaling.kind, *(f"{k}={json.dumps(v)}" for k, v in given)])]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="KIND,FACTOR=X,…",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, RotaryScaling),
        str_from_instance=write,
    )


def _mesh_rule(info):
    """MeshSizes are one word, axis=size,…: data=2,fsdp=4."""
    import tyro

    from jaxformer.training.config import Mesh, MeshSizes

    if info.type is not Mesh:
        return None

    def read(words):
        pairs = [axis.split("=", 1) for axis in words[0].split(",")]
        names, axes = [pair[0] for pair in pairs], MeshSizes.__dataclass_fields__
        if any(len(pair) < 2 for pair in pairs) or len(set(names)) < len(names):
            raise ValueError(f"{words[0]!r}: each axis is NAME=SIZE, once")
        if set(names) - set(axes):
            raise ValueError(f"{words[0]!r}: the axes are {', '.join(axes)}")
        if not all(size.isdecimal() for _, size in pairs):
            raise ValueError(f"{words[0]!r}: a size is a whole number")
        return MeshSizes(**{name: int(size) for name, size in pairs})

    def write(mesh):
        return [",".join(f"{name}={getattr(mesh, name)}" for name in mesh.__dataclass_fields__)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="AXIS=SIZE,…",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, MeshSizes),
        str_from_instance=write,
    )


def _one_line(box: str) -> str:
    """What tyro says between the first two rules of a box, whose upper edge is a rule; where there
    is none of these characters, rules are dashes."""
    inside = "\n".join(line.strip(" │╭╮╰╯") for line in box.splitlines())
    _, *parts = re.split(r"(?m)^(?:─.*|-{3,})$", inside)
    message = " ".join(parts[0].split()) if parts else "the command line could not be understood"
    message = re.sub(r"no type matching .*- <class '[\w.]+'>: ", "", message)  # why, and no more
    return re.sub(r"^Error parsing [A-Za-z.]+: ", "", message)  # a config's own message says enough
