"""A bug changes its target, exactly once, in every process."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import syntax
from tests.mutation.bug import PROJECT, Bug, environment
from tests.mutation.bugs import BUGS
from tests.mutation.changes import Replace, changed, gives, having, inside, takes, then

MODULE = """
LIMIT = 3 * 3

def outer(x):
    def inner(y):
        return (y +  # a comment
                1)
    return inner(x) + LIMIT

class Counter:
    @property
    def half(self):
        return self.number / 2
"""


@pytest.mark.parametrize("name", ["LIMIT", "outer", "outer.inner", "Counter", "Counter.half"])
def test_definition_of_a_mutation_target_is_found_by_qualified_name(name):
    assert name.split(".")[-1] in ast.unparse(syntax.definition(ast.parse(MODULE), name))


@pytest.mark.parametrize("name", ["limit", "inner", "half", "outer.half", "LIMIT.half"])
def test_mutation_of_missing_function_raises_error(name):
    with pytest.raises(LookupError, match="defined 0 times"):
        syntax.definition(ast.parse(MODULE), name)


@pytest.mark.parametrize(("old", "new"), [("y+1", "y - 1"), ("return (y + 1)", "return y - 1")])
def test_mutation_ignores_formatting_and_comments_of_replaced_code(old, new):
    tree = ast.parse(MODULE)
    syntax.replace(syntax.definition(tree, "outer"), old, new)
    assert "return y - 1" in ast.unparse(tree)


@pytest.mark.parametrize(("old", "times"), [("y + 2", 0), ("return y", 0), ("3", 2)])
def test_code_replaced_by_a_mutation_must_occur_exactly_once(old, times):
    with pytest.raises(LookupError, match=f"occurs {times} times"):
        syntax.replace(ast.parse(MODULE), old, "4")


@pytest.mark.parametrize(
    "change", [takes(folder=abs), inside("_read", gives(None)), inside("json.dumps", gives(None))]
)
def test_mutating_an_undefined_name_in_a_function_raises_error(change):
    with pytest.raises(LookupError, match="does not occur"):
        Bug("no such name", "artifacts.run:_whole_lines", change, "").source()


def test_attribute_mutation_returns_a_copy_with_changed_attributes():
    path = having(name="another")(PROJECT)
    assert path.name == "another" and path.parent == PROJECT.parent and isinstance(path, Path)


def test_mutation_bug_that_names_a_class_but_no_method_is_rejected():
    with pytest.raises(LookupError, match="name one of its methods"):
        Bug("no such class", "artifacts.run:RunFolder", gives(None), "").source()


def half(number, by=2):
    return number / by


def root_of_halves(numbers, *, plus=0):
    return math.sqrt(sum(half(number) for number in numbers)) + plus


def test_mutated_function_keeps_its_signature():
    assert changed(then(lambda result: result + 1), half)(4, by=4) == 2
    assert changed(gives(7), half)(4) == 7
    with pytest.raises(TypeError, match="half"):
        changed(lambda half: lambda number, of=2: 0, half)


def test_argument_mutation_changes_positional_and_keyword_arguments():
    broken = changed(takes(by=lambda by: by + 1), half)
    assert broken(12) == broken(12, 2) == broken(number=12, by=2) == 4


@pytest.mark.parametrize(
    ("name", "change", "result"),
    [
        ("half", gives(18), 7.0),
        ("sum", gives(36), 7.0),
        ("math.sqrt", lambda sqrt: lambda x: -sqrt(x), -1.0),
    ],
)
def test_scoped_mutation_replaces_a_name_in_one_function_only(name, change, result):
    broken = changed(inside(name, change), root_of_halves)
    assert broken([8, 0], plus=1) == result
    assert root_of_halves([8, 0], plus=1) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "code", "said"),
    [
        (
            Bug("another format", "artifacts.run:RUN_FORMAT", Replace("3", "4"), ""),
            "from jaxformer.artifacts.run import RUN_FORMAT; print(RUN_FORMAT)",
            "4",
        ),
        (
            next(bug for bug in BUGS if bug.name == "two processes train in one folder"),
            "from jaxformer.training.run_folders import _lock; print(_lock('no file'))",
            "True",
        ),
    ],
    ids=["syntax", "function"],
)
def test_code_mutation_takes_effect_in_child_processes(bug, code, said, tmp_path):
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    command = [sys.executable, "-c", start]
    how = {"cwd": tmp_path, "env": environment(bug), "capture_output": True, "text": True}
    assert subprocess.run(command, check=True, **how).stdout.strip() == said
