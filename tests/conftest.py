"""Setup of all tests: shape checks at run time, the compilation cache, and hypothesis profiles."""

import gc
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from jaxtyping import install_import_hook

# Stores compiled programs on disk for other workers, for later runs (slow tests, mutation) and for
# processes that tests start. These processes read the environment variables. In this process, JAX
# may already be imported, so the options are also set below.
PROGRAMS = Path(__file__).parent.parent / ".pytest_cache" / "xla"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Must run before the package is imported, so that every annotated shape is checked. Inside jit, the
# checks run during tracing and cost a compiled function nothing. A mutation run omits the checks:
# they take a quarter of its time, and tests must fail without them.
if "JAXFORMER_BROKEN_FILE" not in os.environ:
    install_import_hook("jaxformer.functional", "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

from jaxformer.functional.attention import blockwise  # noqa: E402
from tests.parts import part  # noqa: E402
from tests.properties import witness  # noqa: E402

# Tracing creates many objects that stay alive. With Python's default thresholds, the search for
# garbage takes 5% of the time of the tests.
gc.set_threshold(50_000, 20, 20)

# The suite mostly compiles. XLA's older code for fused loops, which jax 0.11 removed, compiles in
# half the time. XLA_FLAGS that are already set take precedence: `XLA_FLAGS= pytest tests/parity`
# compiles as users do.
SUITE_XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false"
if jax.__version_info__ < (0, 11):
    os.environ.setdefault("XLA_FLAGS", SUITE_XLA_FLAGS)

# The first example of a property compiles and the rest take milliseconds, so no deadline fits.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=20, derandomize="CI" in os.environ, **_SLOW)
settings.register_profile("thorough", max_examples=400, **_SLOW)
# A mutation run only needs pass or fail for its seed. It neither shrinks nor stores failures,
# because runs on correct code would replay them.
_ONCE = {"phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False}
_ONCE["database"] = None
settings.register_profile("mutation", max_examples=20, derandomize=False, **_ONCE, **_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption(
        "--part", type=part, default="1/1", metavar="K/N", help="only one of N parts of the tests"
    )


def pytest_collection_modifyitems(config, items):
    """Deselects the tests outside the part that `--part` selects."""
    chosen = config.getoption("part")
    others = [item for item in items if not chosen.has(item.nodeid)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if chosen.has(item.nodeid)]


# Each compiled program maps memory, and Linux allows 65,530 mappings per process. A worker with
# thousands of programs would end with a segmentation fault (docs/hazards.md).
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), 20_000
_teardowns = itertools.count(1)


def pytest_runtest_teardown(item):
    """Clears JAX's caches if the process has many memory mappings."""
    looks = next(_teardowns) % 8 == 0 and _MAPS.exists()
    if looks and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Records how many generated cases the test compared with a rule, for the summary."""
    before = witness.cases
    try:
        return (yield)
    finally:
        if witness.cases > before:
            item.user_properties.append(("dependency cases", witness.cases - before))


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiles without XLA's costlier passes, except with HYPOTHESIS_PROFILE=thorough.

    This profile, tests with real sizes, parity tests and tests/functional cover XLA's
    optimizations.
    """
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, os.environ.get("HYPOTHESIS_PROFILE") != "thorough")
    yield
    jax.config.update(option, before)


@pytest.fixture(scope="module")
def small_blocks():
    """Uses blocks of 5 instead of 64 queries, so that a sequence of twelve tokens has three
    blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SMALLEST_BLOCK", 5)
        yield


def pytest_terminal_summary(terminalreporter):
    """Prints how many cases the dependency property compared with its rule, and the failures."""
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
