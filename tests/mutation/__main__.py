"""Put each bug of the catalogue into a copy of the package and see that each of its tests go red.

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


def killers(bug) -> list[tuple[str, str | None, float]]:
    """For each of the bug's tests (what was asked, the test that went red or None, seconds)."""
    found = []
    with mutated_copy(bug) as folder:
        for test in bug.tests.split():
            begin = time.perf_counter()
            red = _first_red(folder, f"tests/{test}", bug.name)
            found.append((test, red, time.perf_counter() - begin))
    return found


def _first_red(folder, test: str, name: str) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", test]
    # Tests that start processes of their own must find the copy too.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1):  # 1: tests failed; anything else: they did not run
        raise RuntimeError(f"{name}: pytest ended with {run.returncode}\n{run.stdout[-3000:]}")
    red = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return red.group(1) if red else None


def main(words: list[str]) -> int:
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    killed = 0
    for bug in chosen:
        found = killers(bug)
        killed += all(red for _, red, _ in found)
        for test, red, seconds in found:
            print(f"{bug.name:55} {seconds:5.0f} s  {red or 'SURVIVED ' + test}", flush=True)
    print(f"{killed} of {len(chosen)} bugs killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
