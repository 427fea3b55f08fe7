"""Parser of the command line. tyro fills in a dataclass, and its errors become one line."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from jaxformer.artifacts.files import json_text
from jaxformer.terminal import say

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

    from jaxformer.training.mesh_sizes import MeshSizes

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
        ValueError: Nothing would read a flag.
    """
    from jaxformer.cli.help import asks_for_help, flags_of, help_text, likely_meant
    from jaxformer.cli.unread import refuse_unread

    if asks_for_help(argv):
        say(help_text(kind, verb, argv, default, main_flags))
        raise SystemExit(0)
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_scaling_rule)
    registry.primitive_rule(_mesh_rule)
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            found = tyro.cli(
                kind,
                prog=f"jaxformer {verb}",
                args=argv,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=registry,
                add_help=False,
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit:
        meant = likely_meant(argv, flags_of(kind, default))
        message = f"Unrecognized option {meant}" if meant else _one_line(errors.getvalue())
        raise UsageError(message) from None
    refuse_unread(found, argv)
    return found


def check_positive(arguments: object, *names: str) -> None:
    """Raises ValueError if one of these optional fields is less than 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _scaling_rule(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec | None":
    """Makes tyro read a RotaryScaling from one word: yarn,factor=4,original_length=4096."""
    from jaxformer.models.config.check import from_fields
    from jaxformer.models.config.rotary import RotaryScaling, Scaling

    def read(word: str) -> RotaryScaling:
        kind, *parts = word.split(",")
        pairs = _pairs(word, parts, "after the kind, each part must be NAME=VALUE")
        values = {name: json.loads(value) for name, value in pairs.items()}
        scaling = from_fields(RotaryScaling, {"kind": kind} | values)
        for name in values:
            if not all(need.holds({"kind": kind}) for need in RotaryScaling.needs.get(name, ())):
                raise ValueError(f"{word!r}: {kind} does not use {name}")
        return scaling

    def write(scaling: RotaryScaling) -> str:
        given = [(x.name, getattr(scaling, x.name)) for x in fields(scaling) if x.name != "kind"]
        return ",".join([scaling.kind, *(f"{k}={json_text(v)}" for k, v in given)])

    return _spec("KIND,FACTOR=X,…", RotaryScaling, read, write) if info.type is Scaling else None


def _mesh_rule(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec | None":
    """Makes tyro read MeshSizes from one word: data=2,fsdp=4."""
    from jaxformer.cli.help import words_of
    from jaxformer.training.mesh_sizes import Mesh, MeshSizes

    return _spec("AXIS=SIZE,…", MeshSizes, read_mesh, words_of) if info.type is Mesh else None


def _spec(
    metavar: str, kind: type[T], read: Callable[[str], T], write: Callable[[T], str]
) -> "PrimitiveConstructorSpec[T]":
    """Returns the specification of an argument that is one word.

    Args:
        metavar: Its placeholder.
        kind: The class of its values.
        read: Maps a word to a value.
        write: Maps a value to a word.
    """
    import tyro

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda x: isinstance(x, kind),
        str_from_instance=lambda x: [write(x)],
    )


def read_mesh(word: str) -> "MeshSizes":
    """Returns the `MeshSizes` of a word such as data=2,fsdp=4; raises ValueError otherwise."""
    from jaxformer.training.mesh_sizes import MeshSizes

    axes = MeshSizes.__dataclass_fields__
    sizes = _pairs(word, word.split(","), "each axis must be NAME=SIZE")
    if sizes.keys() - axes.keys():
        raise ValueError(f"{word!r} has an unknown axis; the axes are {', '.join(axes)}")
    if not all(map(str.isdecimal, sizes.values())):
        raise ValueError(f"{word!r}: each size must be a whole number")
    return MeshSizes(**{name: int(size) for name, size in sizes.items()})


def _pairs(word: str, parts: list[str], rule: str) -> dict[str, str]:
    """Returns the values of NAME=VALUE parts by name; raises ValueError with `rule` otherwise."""
    pairs = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(pairs) < len(parts):
        raise ValueError(f"{word!r}: {rule}, and no name may occur twice")
    return pairs


def _one_line(box: str) -> str:
    """Returns the first section of tyro's error box as one line.

    The box's upper edge and a horizontal rule enclose this section. In a terminal that lacks
    box-drawing characters, both are dashes.
    """
    inside = "\n".join(line.strip(" │╭╮╰╯") for line in box.splitlines())
    _, *parts = re.split(r"(?m)^(?:─.*|-{3,})$", inside)
    message = " ".join(parts[0].split()) if parts else "the command line could not be parsed"
    message = re.sub(r"no type matching .*- <class '[\w.]+'>: ", "", message)  # leaves the reason
    message = re.sub(r" - tuple\[jaxformer\..*", "", message)  # the same value, read as a pattern
    return re.sub(r"^Error parsing [A-Za-z.]+: ", "", message)  # config errors name the field
