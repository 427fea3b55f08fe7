"""The names that `import jaxformer as jf` offers."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxformer as jf

ROOMS = "artifacts bench decoding doctor functional hub interpret models training verify".split()


@pytest.mark.parametrize("name", jf.__all__)
def test_every_public_name_is_an_attribute_of_the_package(name, monkeypatch):
    """Each name works before other imports (test_help_does_not_import_jax: without JAX)."""
    monkeypatch.delattr(jf, name, raising=False)
    value = getattr(jf, name)
    assert name in dir(jf)
    assert (value is sys.modules.get(f"jaxformer.{name}")) == (name in ROOMS)


def test_subpackages_are_attributes_of_the_jaxformer_package():
    assert set(ROOMS) <= set(jf.__all__)
    with pytest.raises(AttributeError, match="No jaxformer attribute room"):
        jf.room  # noqa: B018


@pytest.mark.parametrize("room", [jf.functional, jf.interpret, jf.verify])
def test_python_dir_of_each_subpackage_lists_only_its_public_names(room):
    """The list has names that a user can import, but no modules of the room."""
    assert dir(room) == sorted(room.__all__)
    for name in dir(room):
        assert not isinstance(getattr(room, name), ModuleType), name


LISTED = [jf.functional, jf.interpret, jf.verify]
NAMES = [f"jf.{room.__name__.partition('.')[2]}.{x}" for room in LISTED for x in room.__all__]


def documented_imports():
    """Returns the import path of each name that a page imports, such as jf.hub.load."""
    found = set()
    for page in (Path(__file__).parents[1] / "docs").glob("*.md"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if module.partition(".")[0] == "jaxformer" and module.split(".")[1:2] != ["cli"]:
                    path = module.replace("jaxformer", "jf", 1)
                    found |= {f"{path}.{name.name}" for name in node.names}
    return sorted(found)


def parts(path):
    """Yields (object, name of an attribute) along an import path such as jf.hub.load."""
    found = jf
    for name in path.split(".")[1:]:
        yield found, name
        found = getattr(found, name)


def test_every_name_imported_in_the_docs_is_listed_by_dir():
    """The pages write `from jaxformer.training.step import make_step`; users may write `jf.…`.

    functional, interpret and verify list no modules (`verify.rules` is one).
    """
    paths = documented_imports()
    assert len(paths) > 60 and "jf.training.step.make_step" in paths
    for path in paths:
        for owner, name in parts(path):
            is_module = isinstance(getattr(owner, name), ModuleType)
            assert name in dir(owner) or (is_module and owner in LISTED), (
                f"{path}: {name} is missing in dir({owner.__name__})"
            )


@pytest.mark.slow
def test_a_name_of_each_module_can_be_accessed_first_after_a_fresh_import():
    """Each name can be imported before all other names."""
    paths = [*{x.rpartition(".")[0]: x for x in (*NAMES, *documented_imports())}.values()]
    code = f"""
import sys
import jaxformer
for path in {paths}:
    for name in [x for x in sys.modules if x.partition(".")[0] == "jaxformer"]:
        del sys.modules[name]
    import jaxformer as jf
    found = jf
    for name in path.split(".")[1:]:
        try:
            found = getattr(found, name)
        except AttributeError as error:
            print(path, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("path", NAMES)
def test_every_name_of_a_package_has_its_own_docstring(path):
    *_, (owner, name) = parts(path)
    value = getattr(owner, name)
    if callable(value):
        assert inspect.getdoc(value) and value.__doc__ != object.__doc__, path


@pytest.mark.parametrize("package", LISTED)
def test_type_stub_of_each_package_lists_exactly_its_public_names(package):
    stub = Path(package.__file__).with_suffix(".pyi")
    if stub.exists():
        tree = ast.parse(stub.read_text()).body
        names = {x.asname for y in tree if isinstance(y, ast.ImportFrom) for x in y.names}
        assert names == set(package.__all__)
