"""Compilation settings for the tests of the lecture notes' claims."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
    """Compiles without costly optimization passes: the programs are small and run once."""
