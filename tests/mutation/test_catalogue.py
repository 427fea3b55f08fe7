"""The bugs still fit the code, and their tests exist. `python -m tests.mutation` runs the tests."""

import ast
from functools import cache

import pytest

from jaxformer.verify import PROPERTIES
from tests.mutation.bug import PROJECT
from tests.mutation.bugs import BUGS
from tests.mutation.certified import TOLD


def test_mutation_bug_names_are_unique():
    names = {bug.name for bug in BUGS}
    assert len(names) == len(BUGS)
    assert TOLD.keys() <= names and set(TOLD.values()) <= PROPERTIES.keys()


def test_mutation_catalogue_does_not_import_the_package():
    """Otherwise a module that looks up its change during its import would be imported twice."""
    for path in (PROJECT / "tests" / "mutation" / "bugs").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else [module or ""]
            assert not any(name.split(".")[0] == "jaxformer" for name in names), path.name


@pytest.mark.slow
def test_no_two_mutation_bugs_make_the_same_change():
    sources = [bug.source() for bug in BUGS]
    assert len(set(sources)) == len(sources)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_mutation_bug_applies_and_its_module_is_importable(bug):
    code = compile(bug.source(), bug.path, "exec", dont_inherit=True)
    module = ".".join(bug.path.relative_to(PROJECT).with_suffix("").parts)
    exec(code, {"__name__": module.removesuffix(".__init__")})


def test_tests_named_by_mutation_bugs_exist():
    """None is a test of parity: these are skipped where torch is not installed."""
    parsed = cache(lambda file: ast.parse((PROJECT / "tests" / file).read_text()))
    for test in {test for bug in BUGS for test in bug.tests.split()}:
        assert not test.startswith("parity/")
        file, *names = test.split("::")
        scope = parsed(file)
        for name in (name.partition("[")[0] for name in names):  # the case is checked by running it
            found = [node for node in scope.body if getattr(node, "name", None) == name]
            assert len(found) == 1, test
            (scope,) = found
