"""Dataclasses from the command line, by tyro, with its errors brought down to one line."""

import io
import re
from contextlib import redirect_stderr
from typing import TypeVar

T = TypeVar("T")


class UsageError(Exception):
    """The command line could not be understood; the message is one line."""


def parse(kind: type[T], verb: str, argv: list[str], default: T | None = None) -> T:
    """An instance of the dataclass `kind`; nested fields are flags of their own names."""
    import tyro

    said = io.StringIO()
    defaults = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind,
                prog=f"jaxformer {verb}",
                args=argv,
                config=(tyro.conf.OmitArgPrefixes,),
                **defaults,
            )
    except SystemExit as stop:
        if stop.code:
            raise UsageError(_one_line(said.getvalue())) from None
        raise


def _one_line(box: str) -> str:
    """What tyro says between the first two rules of a box, whose upper edge is a rule; where there
    is none of these characters, rules are dashes."""
    inside = "\n".join(line.strip(" │╭╮╰╯") for line in box.splitlines())
    _, *parts = re.split(r"(?m)^(?:─.*|-{3,})$", inside)
    message = " ".join(parts[0].split()) if parts else "the command line could not be understood"
    return re.sub(r"^Error parsing [A-Za-z.]+: ", "", message)  # a config's own message says enough
