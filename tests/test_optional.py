"""Messages about missing optional packages include the line that installs the package."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from jaxformer.optional import import_optional

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LINE = re.compile(r"""pip install (?!-q|--)[^\n`]*?\[([a-z]+)\]|install_line\("(\w+)"\)""")
CALL = re.compile(r"import_optional\([^()]*?\"(\w+)\"\s*\)", re.DOTALL)
TEXTS = [
    *(ROOT / "jaxformer").rglob("*.py"),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("*.md"),
    *(ROOT / "experiments").glob("*.md"),
]


def test_every_extra_named_in_the_project_exists():
    named = set()
    for path in TEXTS:
        found = LINE.findall(path.read_text()) + CALL.findall(path.read_text())
        named |= {name for each in found for name in ([each] if isinstance(each, str) else each)}
    assert {"hub", "gguf", "data", "sentencepiece"} < named - {""} <= EXTRAS.keys()


def test_install_commands_for_extras_do_not_name_pypi():
    """The package is not on PyPI, so `pip install jaxformer[hub]` would install another project."""
    for path in TEXTS:
        assert "jaxformer[" not in path.read_text(), path


def test_a_missing_extra_is_reported_with_an_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError) as refused:
        import_optional("gguf", "write x.gguf", "gguf")
    assert str(refused.value) == "to write x.gguf, install gguf: pip install -e '.[gguf]'"
