"""What `jaxformer train` reads of its arguments first: it decides which flags there are."""

import argparse
from pathlib import Path
from typing import NamedTuple

from jaxformer.cli.arguments import UsageError
from jaxformer.models.config import KINDS
from jaxformer.training.presets import kinds_of, training_preset, usual_preset


class First(NamedTuple):
    """The arguments that decide on the defaults of the others. asked, asked_preset: the kind and
    the preset that were named; by_time: minutes end the run."""

    asked: str | None
    asked_preset: str | None
    base: str | None
    kind: str
    preset: str
    out: Path | None
    resume: bool
    by_time: bool


def peek(argv) -> First:
    """Read leniently beforehand."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--preset")
    parser.add_argument("--from", dest="base")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--minutes")
    parser.add_argument("--steps")
    try:
        parsed, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    if parsed.model not in (None, *KINDS):
        raise ValueError(f"--model is {parsed.model!r}; it must be one of {', '.join(KINDS)}")
    kind = parsed.model or next(iter(kinds_of(parsed.preset or "stdlib")), "decoder")
    preset = parsed.preset or usual_preset(kind)
    training_preset(preset, kind)
    by_time = parsed.minutes is not None and parsed.steps is None
    asked = parsed.model, parsed.preset, parsed.base
    return First(*asked, kind, preset, parsed.out, parsed.resume, by_time)
