"""Run the tests of each bug of the catalogue on the package with that bug in it: each must go red.

python -m tests.mutation                 # all of them: a table, exit status 0 if all are killed
python -m tests.mutation window padding  # those whose name holds one of the words
python -m tests.mutation --seeds 5       # each test must go red by each of so many seeds
python -m tests.mutation --sound 20      # the same tests on the code as it is, by so many seeds:
                                         # each must stay green
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutation.bug import PROJECT, environment
from tests.mutation.bugs import BUGS
from tests.mutation.sound import stay_sound

# Red, but not by a test that sees the bug: tests that cannot be imported, a change that fails
# itself, or one that names what is no longer there.
_FAILED_OTHERWISE = re.compile(
    r"ERROR collecting|^tests/mutation/bugs/\S+:\d+: \w+|^E +(?:NameError|UnboundLocalError): ",
    re.MULTILINE,
)


class NotTried(Exception):
    """A test did not run, or failed for another reason than the bug."""


def killers(bug, seeds: int = 1) -> list[tuple[str, str | None, float]]:
    """For each of the bug's tests (what was asked, the test that went red or None, seconds).

    A test that goes red by one seed and not by another catches the bug by luck.
    """
    found = []
    for test in bug.tests.split():
        begin = time.perf_counter()
        reds = [_first_red(bug, f"tests/{test}", seed) for seed in range(seeds)]
        found.append((test, reds[0] if all(reds) else None, time.perf_counter() - begin))
    return found


def _first_red(bug, test: str, seed: int) -> str | None:
    # Those marked slow too: -m takes the place of the one in pyproject.toml.
    options = ["-m", "", "-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    command = [sys.executable, "-m", "pytest", *options, f"--hypothesis-seed={seed}", test]
    run = subprocess.run(command, cwd=PROJECT, env=environment(bug), capture_output=True, text=True)
    # 1: tests failed; more: they did not run.
    if run.returncode not in (0, 1) or _FAILED_OTHERWISE.search(run.stdout):
        raise NotTried(f"{bug.name}: {test} did not try it\n{run.stdout[-3000:]}")
    red = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return red.group(1) if red else None


def kill(bugs, seeds: int) -> int:
    """The table of the bugs, as they are killed; returns how many were not."""
    survived = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = {pool.submit(killers, bug, seeds): bug for bug in bugs}
        for number, done in enumerate(as_completed(tried), start=1):
            lines, is_killed = _said(tried[done], done)
            survived += not is_killed
            for line in lines:
                print(f"{f'{number}/{len(bugs)}':>7}  {line}", flush=True)
    print(f"{len(bugs) - survived} of {len(bugs)} bugs killed")
    return survived


def _said(bug, done) -> tuple[list[str], bool]:
    """(lines of the table, whether each of its tests went red)."""
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
    parser.add_argument("words", nargs="*", help="bugs whose name holds one of them; else all")
    parser.add_argument("--seeds", type=int, default=1, metavar="SEEDS", help="red by so many")
    parser.add_argument("--sound", type=int, metavar="SEEDS", help="try the tests on sound code")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    words = arguments.words
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    if arguments.sound:
        return int(stay_sound(chosen, arguments.sound) > 0)
    return int(kill(chosen, arguments.seeds) > 0)


if __name__ == "__main__":
    sys.exit(main())
