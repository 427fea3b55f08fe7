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
def test_a_target_is_found_by_its_name(name):
    assert name.split(".")[-1] in ast.unparse(syntax.definition(ast.parse(MODULE), name))


@pytest.mark.parametrize("name", ["limit", "inner", "half", "outer.half", "LIMIT.half"])
def test_what_is_not_there_is_no_target(name):
    with pytest.raises(LookupError, match="defined 0 times"):
        syntax.definition(ast.parse(MODULE), name)


@pytest.mark.parametrize(("old", "new"), [("y+1", "y - 1"), ("return (y + 1)", "return y - 1")])
def test_formatting_and_comments_do_not_matter(old, new):
    tree = ast.parse(MODULE)
    syntax.replace(syntax.definition(tree, "outer"), old, new)
    assert "return y - 1" in ast.unparse(tree)


@pytest.mark.parametrize(("old", "times"), [("y + 2", 0), ("return y", 0), ("3", 2)])
def test_what_is_replaced_stands_there_once(old, times):
    with pytest.raises(LookupError, match=f"occurs {times} times"):
        syntax.replace(ast.parse(MODULE), old, "4")


@pytest.mark.parametrize(
    "change", [takes(folder=abs), inside("_read", gives(None)), inside("json.dumps", gives(None))]
)
def test_names_that_a_change_needs_must_occur(change):
    with pytest.raises(LookupError, match="does not occur"):
        Bug("no such name", "artifacts.run:_whole_lines", change, "").source()


def test_an_object_is_copied_with_other_attributes():
    path = having(name="another")(PROJECT)
    assert path.name == "another" and path.parent == PROJECT.parent and isinstance(path, Path)


def test_a_class_is_changed_by_its_methods():
    with pytest.raises(LookupError, match="name one of its methods"):
        Bug("no such class", "artifacts.run:RunFolder", gives(None), "").source()


def half(number, by=2):
    return number / by


def root_of_halves(numbers, *, plus=0):
    return math.sqrt(sum(half(number) for number in numbers)) + plus


def test_a_change_is_called_as_the_original_is():
    assert changed(then(lambda result: result + 1), half)(4, by=4) == 2
    assert changed(gives(7), half)(4) == 7
    with pytest.raises(TypeError, match="half"):
        changed(lambda half: lambda number, of=2: 0, half)


def test_an_argument_is_changed_however_it_is_given():
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
def test_a_name_is_changed_inside_one_function(name, change, result):
    broken = changed(inside(name, change), root_of_halves)
    assert broken([8, 0], plus=1) == result
    assert root_of_halves([8, 0], plus=1) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "code", "said"),
    [
        (
            Bug("another format", "artifacts.run:RUN_FORMAT", Replace("2", "3"), ""),
            "from jaxformer.artifacts.run import RUN_FORMAT; print(RUN_FORMAT)",
            "3",
        ),
        (
            next(bug for bug in BUGS if bug.name == "two processes train in one folder"),
            "from jaxformer.training.run_folders import _lock; print(_lock('no file'))",
            "True",
        ),
    ],
    ids=["syntax", "function"],
)
def test_what_a_process_starts_has_the_bug_too(bug, code, said, tmp_path):
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    command = [sys.executable, "-c", start]
    how = {"cwd": tmp_path, "env": environment(bug), "capture_output": True, "text": True}
    assert subprocess.run(command, check=True, **how).stdout.strip() == said
