"""Imports run one way between the rooms of the package."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxformer"
# Each room may import itself and the rooms that stand above it, but no room on its own line.
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
    """Returns the modules and names that a module imports, also inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {x.name for x in node.names}
    return modules


def imported_rooms(path: Path) -> set[str]:
    """Returns the rooms that a module imports, including imports inside functions."""
    parts = (x.split(".") for x in imported_modules(path) if x.startswith("jaxformer."))
    return {room for _, room, *_ in parts if room in RANK}


def test_the_order_names_every_room():
    assert RANK.keys() == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("room", RANK)
def test_a_room_imports_only_the_rooms_before_it(room):
    allowed = {room, *(other for other in RANK if RANK[other] < RANK[room])}
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported_rooms(path) <= allowed, path.relative_to(PACKAGE)


def test_one_module_imports_a_private_module_of_jax():
    """`private_cudnn.py` says why. The tests and the experiments import none."""
    folders = (PACKAGE.parent / name for name in ("jaxformer", "tests", "experiments"))
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    private = {path for path in paths if any(map(is_private, imported_modules(path)))}
    assert private == {PACKAGE / "functional/attention/private_cudnn.py"}


def is_private(module: str) -> bool:
    top, *parts = module.split(".")
    return top in ("jax", "jaxlib") and any(re.match("_[^_]", part) for part in parts)
