"""Runs `real_sizes` in a process that compiles programs as users compile them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SUITE_XLA_FLAGS

PROJECT = Path(__file__).parents[2]


@pytest.mark.slow
def test_logits_of_large_batch_equal_those_of_single_sequences():
    """Batches of up to 8,192 prompt tokens, and beams of 4,096 hypotheses; see `real_sizes`."""
    flags = os.environ.get("XLA_FLAGS", "").replace(SUITE_XLA_FLAGS, "")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "tests.decoding.real_sizes"]
    run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
