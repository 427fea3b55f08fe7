"""`jaxformer translate RUN < source > translations`: line by line, in order."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from jaxformer.cli.arguments import parse
from jaxformer.cli.opened import RunArguments, opened

LINES = 1024  # read, and translated, before their translations are written


@dataclass(frozen=True)
class TranslateArguments(RunArguments):
    """Translate the lines of standard input; each gives one line on standard output."""

    beam_width: int = 5
    """hypotheses that are kept; 1: greedy"""
    batch_size: int = 64
    """lines that are translated at once"""

    def __post_init__(self):
        for name in ("beam_width", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def main(argv: list[str]) -> int:
    """Load, then read, translate and write."""
    arguments = parse(TranslateArguments, "translate", argv)
    with opened(arguments) as checkpoint:
        _translate(checkpoint, arguments)
    return 0


def _translate(checkpoint, arguments: TranslateArguments) -> None:
    from jaxformer.cli.evaluate import is_lowercase
    from jaxformer.decoding.translate import check_translates, translate
    from jaxformer.training.screen import Screen

    model, variables, tokenizer = checkpoint
    check_translates(model)
    if tokenizer is None:
        raise ValueError(f"{arguments.run} has no tokenizer; jaxformer.beam_search takes ids")
    lowercase, done = is_lowercase(arguments.run), 0
    how = {"beam_width": arguments.beam_width, "batch_size": arguments.batch_size}
    if sys.stdin.isatty():
        Screen(stderr=True).say("a sentence a line; Ctrl-D ends")
    for lines in in_groups(sys.stdin, LINES):
        texts = [line.lower() if lowercase else line for line in lines]
        try:
            found = translate(model, variables, tokenizer, texts, **how)
        except ValueError as error:
            raise ValueError(f"from line {done + 1} on: {error}") from None
        for text in found:
            print(" ".join(text.splitlines()))  # a line each, whatever was generated
        sys.stdout.flush()
        done += len(lines)


def in_groups(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """The lines without their ends, so many at a time."""
    lines = iter(lines)
    while group := [line.rstrip("\n").removesuffix("\r") for line in islice(lines, size)]:
        yield group
