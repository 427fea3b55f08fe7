"""How the properties are run: many small programs, each compiled once."""

import jax
import pytest

from jaxformer.functional import blockwise


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of five queries instead of sixty-four: rows of twelve tokens then have three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SMALLEST_BLOCK", 5)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request):
    """Compile without XLA's costlier passes, unless the module says OPTIMIZED (or -m slow runs).

    What the optimiser does to a program is tried by generation, parity and tests/functional.
    """
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    optimized = getattr(request.module, "OPTIMIZED", request.config.getoption("-m") == "slow")
    jax.config.update(option, not optimized)
    yield
    jax.config.update(option, before)
