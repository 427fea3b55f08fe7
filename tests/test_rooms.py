"""Imports run one way between the rooms of the package."""

import ast
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


def imported_rooms(path: Path) -> set[str]:
    """Returns the rooms that a module imports, including imports inside functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {x.name for x in node.names}
    parts = (module.split(".") for module in modules if module.startswith("jaxformer."))
    return {room for _, room, *_ in parts if room in RANK}


def test_the_order_names_every_room():
    assert RANK.keys() == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


@pytest.mark.parametrize("room", RANK)
def test_a_room_imports_only_the_rooms_before_it(room):
    allowed = {room, *(other for other in RANK if RANK[other] < RANK[room])}
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported_rooms(path) <= allowed, path.relative_to(PACKAGE)
