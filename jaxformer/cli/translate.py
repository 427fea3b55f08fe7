"""`jaxformer translate RUN < source > translations`: line by line, in order."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

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
    from jaxformer.decoding.translate import check_translates, translate_ids
    from jaxformer.training.screen import Screen

    model, variables, tokenizer = checkpoint
    check_translates(model)
    if tokenizer is None:
        raise ValueError(f"{arguments.run} has no tokenizer; jaxformer.beam_search takes ids")
    longest, done = model.config.max_source_length, 0
    how = {"beam_width": arguments.beam_width, "batch_size": arguments.batch_size}
    if sys.stdin.isatty():
        Screen(stderr=True).say("a sentence a line; Ctrl-D ends")
    for lines in in_groups(_lines_of(sys.stdin), LINES):
        sources = list(map(tokenizer.encode_source, lines))
        fitting = list(takewhile(lambda source: len(source) <= longest, sources))
        for text in translate_ids(model, variables, tokenizer, fitting, **how):
            print(" ".join(text.splitlines()))  # a line each, whatever was generated
        sys.stdout.flush()
        done += len(fitting)
        if len(fitting) < len(sources):
            raise ValueError(
                f"line {done + 1} has {len(sources[len(fitting)])} tokens; this model's "
                f"max_source_length is {longest} (the lines before it are translated)"
            )


def _lines_of(file) -> Iterator[str]:
    """Lines without their ends, which are what `evaluate` takes for the end of a line: a line feed,
    or a carriage return and a line feed. ValueError names one that is not UTF-8 text."""
    for number, line in enumerate(getattr(file, "buffer", file), 1):
        try:
            text = line.decode() if isinstance(line, bytes) else line
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} of standard input is not UTF-8 text: {error}"
            ) from None
        yield text.removesuffix("\n").removesuffix("\r")


def in_groups(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """So many lines at a time."""
    lines = iter(lines)
    while group := list(islice(lines, size)):
        yield group
