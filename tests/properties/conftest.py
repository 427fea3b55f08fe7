"""How the properties are run: many small programs, each compiled once."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation, small_blocks):
    """All of them."""
