"""Put each bug of the catalogue into a copy of the package and see that its tests go red.

python -m tests.mutation                 # all of them: a table, exit status 0 if all are killed
python -m tests.mutation window padding  # those whose name holds one of the words
"""

import os
import re
import subprocess
import sys
import time

from tests.mutation.bugs import BUGS
from tests.mutation.copies import mutated_copy


def killer(bug) -> tuple[str | None, float]:
    """The first test that goes red with the bug in (None: it survived), and the seconds it took."""
    begin = time.perf_counter()
    with mutated_copy(bug) as folder:
        tests = [f"tests/{test}" for test in bug.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        # Tests that start processes of their own must find the copy too.
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if run.returncode not in (0, 1):  # 1: tests failed; anything else: they did not run
        raise RuntimeError(f"{bug.name}: pytest ended with {run.returncode}\n{run.stdout[-3000:]}")
    red = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return (red.group(1) if red else None), seconds


def main(words: list[str]) -> int:
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    survivors = 0
    for bug in chosen:
        test, seconds = killer(bug)
        survivors += test is None
        print(f"{bug.name:55} {seconds:5.0f} s  {test or 'SURVIVED ' + bug.tests}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} bugs killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
