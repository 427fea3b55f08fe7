"""Parser of the command line. tyro fills in a dataclass, and its errors become one line."""

import io
import json
import re
from contextlib import redirect_stderr
from dataclasses import fields
from typing import TypeVar

from jaxformer.artifacts.files import json_text
from jaxformer.terminal import say

T = TypeVar("T")


class UsageError(Exception):
    """The command line could not be parsed. The message is one line."""


def parse(
    kind: type[T],
    verb: str,
    argv: list[str],
    default: T | None = None,
    main_flags: tuple[str, ...] = (),
) -> T:
    """Returns an instance of the dataclass `kind`.

    A field of a nested dataclass becomes a flag without a prefix.

    Args:
        kind: The dataclass of the arguments.
        verb: The name of the verb.
        argv: The words after the verb. --help and --help-all print the flags and exit.
        default: An instance whose values are the defaults; None: the defaults of the class.
        main_flags: The flags that --help lists; (): all flags.

    Raises:
        UsageError: The words cannot be parsed.
    """
    from jaxformer.cli.help import asks_for_help, help_text

    if asks_for_help(argv):
        say(help_text(kind, verb, argv, default, main_flags))
        raise SystemExit(0)
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_scaling_rule)
    registry.primitive_rule(_mesh_rule)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=f"jaxformer {verb}",
                args=argv,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=registry,
                add_help=False,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit:
        raise UsageError(_explained(said.getvalue(), kind, argv, default)) from None


def _explained(box: str, kind: type, argv: list[str], default) -> str:
    """Returns tyro's error as one line or, for misspelled flags, the closest known flags."""
    from jaxformer.cli.help import flags_of, likely_meant

    meant = likely_meant(argv, flags_of(kind, default))
    return f"Unrecognized option {meant}" if meant else _one_line(box)


def _scaling_rule(info):
    """Makes tyro read a RotaryScaling from one word: yarn,factor=4,original_length=4096."""
    import tyro

    from jaxformer.models.config.check import from_fields
    from jaxformer.models.config.rotary import RotaryScaling, Scaling

    if info.type is not Scaling:
        return None

    def read(words):
        kind, *fields = words[0].split(",")
        pairs = [field.split("=", 1) for field in fields]
        names = [pair[0] for pair in pairs]
        if any(len(pair) < 2 for pair in pairs) or len(set(names)) < len(names):
            raise ValueError(
                f"{words[0]!r}: after the kind, each part must be NAME=VALUE, and no name may "
                "occur twice"
            )
        return from_fields(RotaryScaling, {"kind": kind} | {x: json.loads(y) for x, y in pairs})

    def write(scaling):
        given = [(x.name, getattr(scaling, x.name)) for x in fields(scaling) if x.name != "kind"]
        return [",".join([scaling.kind, *(f"{k}={json_text(v)}" for k, v in given)])]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="KIND,FACTOR=X,…",
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, RotaryScaling),
        str_from_instance=write,
    )


def _mesh_rule(info):
    """Makes tyro read MeshSizes from one word: data=2,fsdp=4."""
    import tyro

    from jaxformer.training.config import Mesh, MeshSizes

    if info.type is not Mesh:
        return None

    def write(mesh):
        return [",".join(f"{name}={getattr(mesh, name)}" for name in mesh.__dataclass_fields__)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="AXIS=SIZE,…",
        instance_from_str=lambda words: read_mesh(words[0]),
        is_instance=lambda x: isinstance(x, MeshSizes),
        str_from_instance=write,
    )


def read_mesh(word: str):
    """Returns the `MeshSizes` of a word such as data=2,fsdp=4; raises ValueError otherwise."""
    from jaxformer.training.config import MeshSizes

    pairs = [axis.split("=", 1) for axis in word.split(",")]
    names, axes = [pair[0] for pair in pairs], MeshSizes.__dataclass_fields__
    if any(len(pair) < 2 for pair in pairs) or len(set(names)) < len(names):
        raise ValueError(f"{word!r}: each axis must be NAME=SIZE, and no name may occur twice")
    if set(names) - set(axes):
        raise ValueError(f"{word!r} has an unknown axis; the axes are {', '.join(axes)}")
    if not all(size.isdecimal() for _, size in pairs):
        raise ValueError(f"{word!r}: each size must be a whole number")
    return MeshSizes(**{name: int(size) for name, size in pairs})


def _one_line(box: str) -> str:
    """Returns the first section of tyro's error box as one line.

    The box's upper edge and a horizontal rule enclose this section. In a terminal that lacks
    box-drawing characters, both are dashes.
    """
    inside = "\n".join(line.strip(" │╭╮╰╯") for line in box.splitlines())
    _, *parts = re.split(r"(?m)^(?:─.*|-{3,})$", inside)
    message = " ".join(parts[0].split()) if parts else "the command line could not be parsed"
    message = re.sub(
        r"no type matching .*- <class '[\w.]+'>: ", "", message
    )  # keep the reason only
    return re.sub(r"^Error parsing [A-Za-z.]+: ", "", message)  # config errors name the field
