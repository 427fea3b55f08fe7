"""Runs pytest in a forked process that has already imported the libraries.

Importing JAX, Flax, Orbax and matplotlib takes several seconds, which is most of the time of a
bug's test. A server process imports them once and forks a process for each run. It does not import
the package, whose source differs between runs, and it starts no JAX backend.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# Libraries that the package and its tests import, not the package itself.
LIBRARIES = """
    _pytest.config beartype chex flax.linen hypothesis jax jax.numpy jaxtyping matplotlib.figure
    numpy optax orbax.checkpoint pytest rich.console rich.progress safetensors.numpy tokenizers
""".split()
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(LIBRARIES)


class Outcome(NamedTuple):
    """The exit status of pytest and its output."""

    status: int
    output: str


def run_pytest(arguments: list[str], environment: dict[str, str], folder: Path) -> Outcome:
    """Runs pytest in a forked process with this environment and working directory.

    The run has its own folder of temporary files. In the folder that pytest would share between
    runs, one run removes old files while another lists them, which fails now and then.
    """
    with tempfile.TemporaryDirectory() as own:
        output = Path(own) / "output"
        arguments = [f"--basetemp={own}/tests", *arguments]
        process = SERVER.Process(
            target=_run_and_exit, args=(arguments, environment, str(folder), str(output))
        )
        process.start()
        process.join()
        return Outcome(process.exitcode, output.read_text(errors="replace"))


def _run_and_exit(arguments, environment, folder, output) -> None:
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.pycache_prefix = environment["PYTHONPYCACHEPREFIX"]
    # `sitecustomize` ran when the server started, but without the bug. It is run by its path,
    # because Debian's Python has another module of this name.
    runpy.run_path(str(Path(__file__).parent / "site" / "sitecustomize.py"))

    import pytest

    # hypothesis and jaxtyping are pytest plugins, so pytest warns that it cannot rewrite them.
    quiet = "-Wignore::pytest.PytestAssertRewriteWarning"
    status = int(pytest.main([quiet, *arguments]))
    sys.stdout.flush()
    os._exit(status)
