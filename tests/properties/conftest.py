"""How the properties are run: many small programs, each compiled once."""

import pytest

from jaxformer.functional import blockwise


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of five queries instead of sixty-four: rows of twelve tokens then have three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SMALLEST_BLOCK", 5)
        yield


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
    """All of them."""
