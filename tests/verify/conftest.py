"""Fixture that applies to all tests of `verify`."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
    """Turns off XLA optimizations, because these programs are small and run few times."""
