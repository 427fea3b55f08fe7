"""Runs the tests of each bug in the catalogue on the package with that bug: they must fail.

python -m tests.mutation                 # all bugs: a table, exit status 0 if all are killed
python -m tests.mutation window padding  # bugs whose name contains one of the words
python -m tests.mutation --part 2/3      # the second of three parts of the bugs
python -m tests.mutation --seeds 5       # each test must fail with each of 5 seeds
python -m tests.mutation --sound 20      # the same tests on the unchanged code with 20 seeds:
                                         # all must pass
"""

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutation.bug import PROJECT, environment
from tests.mutation.bugs import BUGS
from tests.mutation.sound import stay_sound
from tests.mutation.warm import run_pytest
from tests.parts import part

# Failures that do not detect the bug: tests that cannot be imported, a change that raises itself,
# and a change that uses a name that no longer exists.
_FAILED_OTHERWISE = re.compile(
    r"ERROR collecting|^tests/mutation/(?:bugs|changes)\S+:\d+: (?!in )\w+"
    r"|^E +(?:NameError|UnboundLocalError): ",
    re.MULTILINE,
)


class NotTried(Exception):
    """Raised if a test did not run, or failed for another reason than the bug."""


def killers(bug, environ: dict[str, str], seeds: int) -> list[tuple[str, str | None, float]]:
    """Runs the tests of a bug in its environment.

    Returns (test, the failed test or None, seconds) for each. A test that fails with one seed and
    passes with another catches the bug by luck, so it counts as None.
    """
    found = []
    for test in bug.tests.split():
        begin = time.perf_counter()
        reds = [_first_red(bug, environ, f"tests/{test}", seed) for seed in range(seeds)]
        found.append((test, reds[0] if all(reds) else None, time.perf_counter() - begin))
    return found


def _first_red(bug, environ: dict[str, str], test: str, seed: int) -> str | None:
    # Includes slow tests: this -m overrides the one in pyproject.toml.
    options = ["-m", "", "-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    arguments = [*options, f"--hypothesis-seed={seed}", test]
    run = run_pytest(arguments, environ, PROJECT)
    # Status 1 means that tests failed. With other statuses, pytest could not run the tests, or its
    # process died, which once happened after the report. In these cases, the tests run again.
    if run.status not in (0, 1):
        run = run_pytest(arguments, environ, PROJECT)
    red = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.output, re.MULTILINE)
    is_clear = run.status == 0 or (run.status == 1 and red)
    if not is_clear or _FAILED_OTHERWISE.search(run.output):
        message = f"{bug.name}: {test} did not run properly (exit status {run.status})"
        raise NotTried(f"{message}\n{run.output[-3000:]}")
    return red.group(1) if red else None


def kill(bugs, seeds: int) -> int:
    """Prints a table of the bugs as their tests finish. Returns the number of surviving bugs."""
    survivors = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The environments are made in this thread alone, because ast.parse fails now and then if
        # two threads call it (https://github.com/python/cpython/issues/106905).
        tried = {pool.submit(killers, bug, environment(bug), seeds): bug for bug in bugs}
        for number, done in enumerate(as_completed(tried), start=1):
            lines, is_killed = _said(tried[done], done)
            if not is_killed:
                survivors.append(tried[done].name)
            for line in lines:
                print(f"{f'{number}/{len(bugs)}':>7}  {line}", flush=True)
    print(f"{len(bugs) - len(survivors)} of {len(bugs)} bugs killed")
    for name in survivors:
        print(f"survived: {name}")
    return len(survivors)


def _said(bug, done) -> tuple[list[str], bool]:
    """Returns (lines of the table, whether each test of the bug failed)."""
    try:
        found = done.result()
    except NotTried as error:
        return [str(error)], False
    lines = [
        f"{bug.name:60} {seconds:4.0f} s  {red or 'SURVIVED ' + test}"
        for test, red, seconds in found
    ]
    return lines, all(red for _, red, _ in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("words", nargs="*", help="only bugs whose name contains one of the words")
    parser.add_argument("--seeds", type=int, default=1, metavar="SEEDS", help="seeds per test")
    parser.add_argument(
        "--part", type=part, default="1/1", metavar="K/N", help="only one of N parts of the bugs"
    )
    parser.add_argument("--sound", type=int, metavar="SEEDS", help="run on the unchanged code")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    words = arguments.words
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    chosen = [bug for bug in chosen if arguments.part.has(bug.name)]
    if arguments.sound:
        return int(stay_sound(chosen, arguments.sound) > 0)
    return int(kill(chosen, arguments.seeds) > 0)


if __name__ == "__main__":
    sys.exit(main())
