"""Runs the tests that kill bugs on the unchanged code with many seeds: all must pass."""

import contextlib
import io
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.mutation.bug import PROJECT


def stay_sound(bugs, seeds: int) -> int:
    """Runs the tests of the bugs. Returns the number of seeds with a failure.

    The first seed runs all tests, the others only those that generate their cases. A process runs
    its seeds one after another, so that they share its compiled programs.
    """
    tests = sorted({f"{PROJECT}/tests/{test}" for bug in bugs for test in bug.tests.split()})
    cores = min(os.cpu_count(), seeds)
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        shares = [range(core, seeds, cores) for core in range(cores)]
        wrong = sum(pool.map(_red_seeds, [tests] * cores, shares))
    print(f"{len(tests)} tests and files, {seeds} seeds: failures with {wrong} seeds")
    return wrong


def _red_seeds(tests, seeds) -> int:
    wrong = 0
    for seed in seeds:
        begin, which = time.perf_counter(), "hypothesis" if seed else ""
        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", which]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = pytest.main([*options, f"--hypothesis-seed={seed}", *tests])
        wrong += code != 0
        red = said.getvalue()[-3000:] if code else "green"
        print(f"seed {seed:2}: {time.perf_counter() - begin:4.0f} s  {red}", flush=True)
    return wrong
