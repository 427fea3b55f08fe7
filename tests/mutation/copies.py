"""Copies of the project with one bug in them."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def patched(bug) -> str:
    """The text of the bug's file with the bug in it; ValueError if it no longer fits the code."""
    text = (PROJECT / "jaxformer" / bug.file).read_text()
    if text.count(bug.old) != 1:
        raise ValueError(
            f"{bug.name}: its text stands {text.count(bug.old)} times in jaxformer/{bug.file}; "
            "it must stand there once"
        )
    return text.replace(bug.old, bug.new)


@contextmanager
def mutated_copy(bug):
    """A folder with the package, its tests and its settings, the bug put in."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name in ("jaxformer", "tests"):
            shutil.copytree(PROJECT / name, folder / name)
        shutil.copy(PROJECT / "pyproject.toml", folder)
        (folder / "jaxformer" / bug.file).write_text(patched(bug))
        yield folder
