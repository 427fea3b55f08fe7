"""Put each bug of the catalogue into a copy of the package and see that each of its tests goes red.

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
from concurrent.futures import ThreadPoolExecutor

from tests.mutation.bugs import BUGS
from tests.mutation.copies import mutated_copy
from tests.mutation.sound import stay_sound


def killers(bug, seeds: int = 1) -> list[tuple[str, str | None, float]]:
    """For each of the bug's tests (what was asked, the test that went red or None, seconds).

    A test that goes red by one seed and not by another catches the bug by luck.
    """
    found = []
    with mutated_copy(bug) as folder:
        for test in bug.tests.split():
            begin = time.perf_counter()
            reds = [_first_red(folder, f"tests/{test}", bug.name, seed) for seed in range(seeds)]
            found.append((test, reds[0] if all(reds) else None, time.perf_counter() - begin))
    return found


def _first_red(folder, test: str, name: str, seed: int) -> str | None:
    options = ["-x", "-n0", "-m", "", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    command = [sys.executable, "-m", "pytest", *options, f"--hypothesis-seed={seed}", test]
    # Tests that start processes of their own must find the copy too.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1):  # 1: tests failed; anything else: they did not run
        raise RuntimeError(f"{name}: pytest ended with {run.returncode}\n{run.stdout[-3000:]}")
    red = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return red.group(1) if red else None


def kill(bugs, seeds: int) -> int:
    """The table of the bugs, as they are killed; returns how many were not."""
    survived = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = pool.map(lambda bug: killers(bug, seeds), bugs)
        for bug, found in zip(bugs, tried, strict=True):
            survived += not all(red for _, red, _ in found)
            for test, red, seconds in found:
                print(f"{bug.name:60} {seconds:4.0f} s  {red or 'SURVIVED ' + test}", flush=True)
    print(f"{len(bugs) - survived} of {len(bugs)} bugs killed")
    return survived


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
