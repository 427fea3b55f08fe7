"""How these are run."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
    """Small programs, each compiled once."""
