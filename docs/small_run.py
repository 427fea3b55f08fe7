"""Small run that several pages load: a decoder, trained on a text of three sentences in seconds."""

import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path

from jaxformer.cli import main

# Each value is the number of times that the sentence occurs in the text.
SENTENCES = {
    "the tide came in twice, and the clocks had stopped.\n": 1200,
    "the tide came in twice, and the boats were gone.\n": 300,
    "the boats were gone, and nobody knew the hour.\n": 600,
}


def run_quietly(command: str, stdin: str = "") -> str:
    """Runs a command of `jaxformer` and returns its output.

    Args:
        command: The words after `jaxformer`, separated by spaces.
        stdin: The text that the command reads from standard input.
    """
    printed, before = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(printed):
            main(command.split())
    finally:
        sys.stdin = before
    return printed.getvalue()


def train_small_run() -> None:
    """Enters a new temporary folder, writes my.txt there and trains the run runs/tide on it."""
    os.chdir(tempfile.mkdtemp())
    lines = [line for line, count in SENTENCES.items() for _ in range(count)]
    random.Random(0).shuffle(lines)
    Path("my.txt").write_text("".join(lines))
    run_quietly("train my.txt --preset tiny --steps 120 --out runs/tide")
