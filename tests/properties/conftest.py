"""How the properties are run: many small programs, each compiled once."""

import pytest

from jaxformer.functional import blockwise
from tests.properties import witness


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of five queries instead of sixty-four: rows of twelve tokens then have three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SMALLEST_BLOCK", 5)
        yield


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
    """All of them."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Notes how many generated cases the test held to a rule, for the summary of the run."""
    before = witness.cases
    try:
        return (yield)
    finally:
        if witness.cases > before:
            item.user_properties.append(("dependency cases", witness.cases - before))
