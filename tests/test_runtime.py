"""`keep_freed_memory`: the memory of one call of a jitted function serves the next one."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
import resource, jax, jax.numpy as jnp, jaxformer

jaxformer.keep_freed_memory()

@jax.jit
def f(first):
    # Stores 128 MB, 32,768 pages of 4 kB. XLA runs small programs in the calling thread, never
    # programs with a loop.
    rows = jax.lax.scan(lambda x, _: (x + 1, jnp.full(1 << 20, x)), first, length=32)[1]
    return rows.sum() + rows[:, ::3].max()

for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(0.0).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc is glibc's")
def test_a_call_uses_the_memory_of_the_call_before():
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert int(done.stdout or -1) in range(1000), done.stderr
