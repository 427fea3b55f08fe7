"""`jaxformer translate RUN [FILE…] > translations`: translates line by line, in order."""

import gzip
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxformer.artifacts.spelled_tokens import spelled_tokens
from jaxformer.cli.arguments import parse
from jaxformer.cli.checkpoints import DecodingArguments, load_model, print_special
from jaxformer.cli.flags import positional
from jaxformer.models.config.check import check_at_least
from jaxformer.terminal import write

if TYPE_CHECKING:
    from jaxformer.artifacts.saved import Checkpoint

LINES = 1024  # Translations are written in groups of this many lines.


@dataclass(frozen=True)
class TranslateArguments(DecodingArguments):
    """Translate the lines of files or, without FILE, of standard input.

    For each input line, one line is written to standard output.
    """

    files: Annotated[tuple[Path, ...], positional("FILE…")] = ()
    """UTF-8 text files with one sentence per line; may be .gz"""
    beam_width: int | None = None
    """beam width; 1 is greedy decoding; default: the checkpoint's setting, or 4"""
    batch_size: int = 64
    """number of lines per batch"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, self, "beam_width", "batch_size")


def main(argv: list[str]) -> int:
    """Loads the model, then reads, translates and writes the lines."""
    arguments = parse(TranslateArguments, "translate", argv)
    require_files(arguments.files)
    with load_model(arguments) as checkpoint:
        _translate(checkpoint, arguments)
    return 0


def _translate(checkpoint: "Checkpoint", arguments: TranslateArguments) -> None:
    from jaxformer.decoding.translate import check_translates, translate_ids
    from jaxformer.training.screen import Screen

    model, variables, tokenizer = checkpoint
    check_translates(model)
    if tokenizer is None:
        raise ValueError(
            f"{arguments.run} has no tokenizer; the Python function jaxformer.beam_search takes ids"
        )
    longest = model.config.longest_source
    options = {"beam_width": arguments.beam_width, "batch_size": arguments.batch_size}
    if not arguments.files and sys.stdin.isatty():
        Screen(stderr=True).say("Type one sentence per line. Ctrl-D ends the input.")
    found: Counter[str] = Counter()
    for path in arguments.files or (None,):
        unread, done = iterate_lines(path), 0
        while lines := list(islice(unread, LINES)):
            found.update(spelled_tokens(tokenizer, ["\n".join(lines)]))
            sources = list(map(tokenizer.encode_source, lines))
            fitting = list(takewhile(lambda source: len(source) <= longest, sources))
            for text in translate_ids(model, variables, tokenizer, fitting, **options):
                # Generated line feeds become spaces, so that each translation is one line.
                write(" ".join(text.splitlines()) + "\n")
            done += len(fitting)
            if len(fitting) < len(sources):
                where = "" if path is None else f" of {path}"
                raise ValueError(
                    f"line {done + 1}{where} has {len(sources[len(fitting)])} tokens; this model's "
                    f"max_source_length is {longest} (the lines before it were translated)"
                )
    print_special(tokenizer, "the sources", found)


def require_files(paths: tuple[Path, ...]) -> None:
    """Raises ValueError for a path that is not a file, before the model is loaded."""
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{path}: {'not a file, but a folder' if path.is_dir() else 'no such file'}"
            )


def iterate_lines(path: Path | None) -> Iterator[str]:
    """Yields the lines of a file without the line ends (LF or CR LF).

    A byte order mark is dropped. `jaxformer evaluate` also treats only LF and CR LF as line ends.

    Args:
        path: The file, which may be .gz, or None for standard input.

    Raises:
        ValueError: a line is not UTF-8 text, or the file cannot be read.
    """
    name, number = "standard input" if path is None else path, 0
    opened = nullcontext(sys.stdin) if path is None else _open(path)
    try:
        with opened as file:
            for line in getattr(file, "buffer", file):
                number += 1
                text = line.decode() if isinstance(line, bytes) else line
                text = text.removeprefix("\ufeff") if number == 1 else text
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {number} of {name} is not UTF-8 text: {error}") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
