"""With `tune_cpu_runtime`, each call of a jitted function reuses the previous call's memory."""

import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

CALLS = """
import resource, jax, jax.numpy as jnp, jaxformer

jaxformer.tune_cpu_runtime()

@jax.jit
def f(first):
    # Stores 128 MB, 32,768 pages of 4 kB. XLA runs small programs in the calling thread, never
    # programs with a loop.
    rows = jax.lax.scan(lambda x, _: (x + 1, jnp.full(1 << 20, x)), first, length=32)[1]
    return rows.sum() + rows[:, ::3].max()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(0.0).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(*(faults() for _ in range(10)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc is glibc's")
def test_tune_cpu_runtime_lets_jitted_calls_reuse_memory():
    """Most calls do. A call may need a larger heap if another thread took some of the freed
    memory."""
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    _, *later = map(int, done.stdout.split())
    assert len(later) == 9 and median(later) < 1000, done.stdout + done.stderr
