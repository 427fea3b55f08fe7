"""Compares loading GPT-2 124M with transformers: time, peak memory and time to the first token.

    python experiments/bench_load.py                      # random weights, in a temporary folder
    python experiments/bench_load.py --record load-cpu

Needs torch and transformers. The files are in the page cache before each measurement. transformers
memory-maps the weights and reads them on first use, so "load and read" also computes the sum of
every weight array.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from alone import alone, peak_memory
from record import Parser, at_least, conclude, require, run
from side_by_side import compare, ratio

from jaxformer.bench.measurement import Rounds

GENERATE = ["generate", "--prompt", "the tide", "--max-new-tokens", "1"]


def ours(folder: str, is_read: bool):
    import jax
    import numpy as np

    import jaxformer as jf

    def load():
        variables = jax.block_until_ready(jf.load(folder).variables)
        if is_read:
            for leaf in jax.tree.leaves(variables):
                np.asarray(leaf).sum()

    return load


def theirs(folder: str, is_read: bool):
    from transformers import GPT2LMHeadModel

    def load():
        model = GPT2LMHeadModel.from_pretrained(folder)
        if is_read:
            for leaf in model.parameters():
                leaf.detach().numpy().sum()

    return load


def memory(folder: str) -> float:
    """Returns the increase of peak memory by loading, divided by the size of the parameters."""
    import jax

    import jaxformer as jf

    jax.numpy.zeros(1).block_until_ready()
    before = peak_memory()
    variables = jax.block_until_ready(jf.load(folder).variables)
    return (peak_memory() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(variables))


def make(folder: Path) -> None:
    """Saves a GPT-2 checkpoint with a tokenizer in the format of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from jaxformer.artifacts.byte_tokenizer import ByteTokenizer

    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    ByteTokenizer.train(["the tide came in twice and the clocks had stopped"] * 9, 300).save(
        folder / "tokenizer.json"
    )


def of_processes(command: list[str], rounds: int) -> list[float]:
    """Times whole processes, with cached bytecode as for an installed package."""
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": tempfile.gettempdir()}
    process = partial(subprocess.run, command, check=True, capture_output=True)
    several = Rounds(rounds, math.inf)
    return several.repeat(lambda: several.time(lambda: process(env=os.environ | kept)))


def main():
    parser = Parser(__doc__)
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=7,
        help="number of rounds; each round runs every program once",
    )
    arguments = parser.parse_args()
    require("torch", "transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "gpt2"
        make(folder)
        figures = {}
        for name, is_read in (("load", False), ("load_and_read", True)):
            makers = {
                who: partial(make_one, str(folder), is_read)
                for who, make_one in (("jaxformer", ours), ("transformers", theirs))
            }
            subjects = compare(makers, arguments.rounds)
            times = ratio(subjects["jaxformer"], subjects["transformers"])
            for who, subject in subjects.items():
                print(f"  {name.replace('_', ' '):14} {who:12} {subject.median:6.3f} s")
            print(f"  jaxformer is {times:.2f} times as fast")
            seconds_of = {who: subject.median for who, subject in subjects.items()}
            figures[name] = {"seconds": seconds_of, "times_as_fast": times}
        python = [sys.executable, "-c"]
        peak = alone(memory, str(folder))
        print(f"  peak memory: {peak:.2f} times the size of the parameters")
        program = "import sys; from jaxformer.cli import main; sys.exit(main(sys.argv[1:]))"
        verb, *words = GENERATE
        generate = [*python, program, verb, str(folder), *words]
        # These two processes fill the compilation cache and are not timed.
        of_processes(generate, 2)
        token, bare = (
            of_processes(command, arguments.rounds)
            for command in (generate, [*python, "import jax"])
        )
        more = statistics.median(a - b for a, b in zip(token, bare, strict=True))
        print(f"  time to the first token: {more:.2f} s more than for `import jax`")
    figures |= {
        "peak_memory": peak,
        "first_token_seconds": statistics.median(token),
        "import_seconds": statistics.median(bare),
        "more_seconds": more,
    }
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
