"""Fixtures of the command line's tests, which share one small trained run."""

import os

import jax
import pytest

from jaxformer.cli import main

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n\n\n" for i in range(400))
SETTINGS = (
    "--preset tiny --max-length 32 --embed-dim 32 --vocab-size 300 --steps 12 --batch-size 4 "
    "--evaluate-every 6 --checkpoint-every 5 --evaluation-windows 4 --sample-tokens 8"
).split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "functions.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus):
    """A finished run of 12 steps; tests must not change it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(corpus), *SETTINGS, "--out", str(folder)]) == 0
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks every test that uses the run as slow, because training it takes half a minute."""
    for item in items:
        if "trained" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """Turns off most XLA optimizations; these tests check messages and files, not speed."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Uses a temporary cache folder instead of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not os.listdir(tmp_path)
