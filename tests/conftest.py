"""What every test shares: shapes checked at run time, and how many cases a property is tried on."""

import gc
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from jaxtyping import install_import_hook

# What is compiled is kept on disk, for other workers, runs (slow tests, mutation) and processes.
PROGRAMS = Path(__file__).parent.parent / ".pytest_cache" / "xla"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Before anything imports the package: from here on each annotated shape in it is checked. Inside
# jit that happens while tracing, so it costs a compiled function nothing.
install_import_hook("jaxformer.functional", "beartype.beartype")

import jax  # noqa: E402

from jaxformer.functional import blockwise  # noqa: E402
from tests.properties import witness  # noqa: E402

# The suite is one long compilation, and XLA's older code for fused loops, which jax 0.11 no longer
# has, compiles in half the time. Flags that are set are left alone: `XLA_FLAGS= pytest
# tests/parity` tries what users run.
SUITE_XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false"
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", SUITE_XLA_FLAGS)

# The first case of a property compiles and the rest run in milliseconds: no deadline fits both.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=20, derandomize="CI" in os.environ, **_SLOW)
settings.register_profile("thorough", max_examples=400, **_SLOW)
# Red or green is all that is asked: by the seed that is given, no simpler case is looked for, and
# none is kept for runs of sound code.
_ONCE = {"phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False}
_ONCE["database"] = None
settings.register_profile("mutation", max_examples=20, derandomize=False, **_ONCE, **_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Each compiled program maps some memory of its own, and Linux gives a process 65,530 mappings: a
# worker that keeps thousands of programs dies of a segmentation fault (docs/hazards.md).
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), 20_000
_teardowns = itertools.count(1)


def pytest_runtest_teardown(item):
    """Drop what is compiled when there is much of it."""
    looks = next(_teardowns) % 8 == 0 and _MAPS.exists()
    if looks and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Note how many generated cases the test held to a rule, for the summary of the run."""
    before = witness.cases
    try:
        return (yield)
    finally:
        if witness.cases > before:
            item.user_properties.append(("dependency cases", witness.cases - before))


@pytest.fixture(scope="module")
def quick_compilation():
    """Compile without XLA's costlier passes; all of them run with HYPOTHESIS_PROFILE=thorough.

    What the optimiser does to a program is tried there, by real sizes, parity and tests/functional.
    """
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, os.environ.get("HYPOTHESIS_PROFILE") != "thorough")
    yield
    jax.config.update(option, before)


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks of five queries instead of sixty-four: rows of twelve tokens then have three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SMALLEST_BLOCK", 5)
        yield


def pytest_terminal_summary(terminalreporter):
    """How often the dependency property was tried, and that it held."""
    counts = {"passed": [], "failed": []}
    for outcome, found in counts.items():
        for report in terminalreporter.stats.get(outcome, ()):
            found += [n for name, n in report.user_properties if name == "dependency cases"]
    tests, failed = len(counts["passed"]), len(counts["failed"])
    if tests or failed:
        terminalreporter.write_line(
            f"dependency: {sum(counts['passed']):,} generated cases in {tests} tests with 0 "
            f"spurious and 0 missing edges; {failed} tests failed"
        )
