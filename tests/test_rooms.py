"""Packages of jaxformer (rooms) import only from packages below them."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxformer"
# Each room may import itself and the rooms listed above it, but no room on its own line.
ORDER = (
    "functional",
    "models",
    "decoding",
    "artifacts",
    "hub training verify",
    "bench doctor interpret",
    "cli",
)
RANK = {room: rank for rank, line in enumerate(ORDER) for room in line.split()}


def imported_modules(path: Path) -> set[str]:
    """Returns the modules and names that a module imports, including imports in functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {x.name for x in node.names}
    return modules


def imported_rooms(path: Path) -> set[str]:
    """Returns the rooms that a module imports, including imports in functions."""
    parts = (x.split(".") for x in imported_modules(path) if x.startswith("jaxformer."))
    return {room for _, room, *_ in parts if room in RANK}


def test_package_import_order_includes_every_package():
    assert RANK.keys() == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("room", RANK)
def test_package_imports_only_from_packages_earlier_in_the_order(room):
    allowed = {room, *(other for other in RANK if RANK[other] < RANK[room])}
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported_rooms(path) <= allowed, path.relative_to(PACKAGE)


def test_only_one_module_imports_private_modules_of_jax():
    """`private_cudnn.py` explains why. Tests and experiments import no private modules."""
    folders = (PACKAGE.parent / name for name in ("jaxformer", "tests", "experiments"))
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    private = {path for path in paths if any(map(is_private, imported_modules(path)))}
    assert private == {PACKAGE / "functional/attention/private_cudnn.py"}


def is_private(module: str) -> bool:
    top, *parts = module.split(".")
    return top in ("jax", "jaxlib") and any(re.match("_[^_]", part) for part in parts)
