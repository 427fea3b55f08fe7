"""Compilation settings for the properties: many small programs, each compiled once."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation, small_blocks):
    """Applies both fixtures to every test of this folder."""
