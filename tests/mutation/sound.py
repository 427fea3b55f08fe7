"""The tests that kill bugs, on the code as it is, by many seeds: each must stay green."""

import contextlib
import io
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.mutation.bug import PROJECT


def stay_sound(bugs, seeds: int) -> int:
    """Returns for how many seeds one of the bugs' tests went red.

    The first seed is for all tests, the others for those that generate their cases. A process tries
    its seeds one after the other, so that what it has compiled serves them all.
    """
    tests = sorted({f"{PROJECT}/tests/{test}" for bug in bugs for test in bug.tests.split()})
    cores = min(os.cpu_count(), seeds)
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        shares = [range(core, seeds, cores) for core in range(cores)]
        wrong = sum(pool.map(_red_seeds, [tests] * cores, shares))
    print(f"{len(tests)} tests and files, {seeds} seeds: red for {wrong}")
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
