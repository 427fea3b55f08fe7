"""The grader of docs/exercises gives all points to the solutions, and none to empty notebooks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
FOLDER = PROJECT / "docs" / "exercises"
EXERCISES = ("lecture_10", "lecture_11", "lecture_13", "induction_heads")
FIXED = "return scaled_heads(jnp.ones((2, 2)).at[1, 0].set(0))"
pytestmark = pytest.mark.filterwarnings("ignore")


def graded(path):
    """Returns (exit status, {exercise: (points, most)}, (total, most), output)."""
    words = ["-m", "pytest", "-n0", "-p", "no:cacheprovider", str(FOLDER), "--student", str(path)]
    run = subprocess.run([sys.executable, *words], cwd=PROJECT, capture_output=True, text=True)
    rows = re.findall(r"^(\d+) of (\d+)  (.+)$", run.stdout, re.MULTILINE)
    total = re.search(r"^(\d+) of (\d+) points$", run.stdout, re.MULTILINE)
    points = {title: (int(got), int(most)) for got, most, title in rows}
    return (
        run.returncode,
        points,
        total and tuple(map(int, total.groups())),
        run.stdout + run.stderr,
    )


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_exercise_solutions_get_all_points(exercise):
    status, points, total, said = graded(FOLDER / "solutions" / f"{exercise}.py")
    assert status == 0, said
    assert len(points) >= 6 and all(got == most for got, most in points.values())
    assert total == tuple(map(sum, zip(*points.values(), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_exercise_notebooks_with_unfilled_gaps_get_no_points(exercise):
    status, points, total, said = graded(FOLDER / f"{exercise.replace('_', '-')}.ipynb")
    assert status == 1, said
    assert len(points) >= 6 and total[0] == 0 < total[1]


def test_there_are_at_least_20_exercises():
    tests = [re.findall(r"^def test_", path.read_text(), re.M) for path in FOLDER.glob("test_*.py")]
    assert sum(map(len, tests)) >= 20


def test_committed_exercise_notebooks_equal_the_output_of_the_build_script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import build

    notebooks = build.notebooks()
    assert sorted(notebooks) == sorted(FOLDER.glob("*.ipynb"))
    for path, content in notebooks.items():
        assert path.read_text() == content, f"run python docs/exercises/build.py: {path.name}"
        cells = json.loads(content)["cells"]
        code = ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]
        assert "%pip install" in code[0]
        assert "NotImplementedError" not in code[0]
        assert sum(text.count("raise NotImplementedError") for text in code) >= 6
        assert "# solution" not in content


def install(clone, monkeypatch):
    """Runs the first code cell of each notebook without jaxformer; returns the commands of pip."""
    monkeypatch.setitem(sys.modules, "jaxformer", None)  # The import then raises ImportError.
    commands = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = next("".join(x["source"]) for x in cells if x["cell_type"] == "code")
        monkeypatch.chdir(path.parent if clone is None else clone)
        # IPython replaces the names in braces.
        code, count = re.subn(r"%(pip .+)", r"commands.append(f'\1')", code)
        assert count == 1
        exec(code, {"commands": commands})
    return commands


def test_first_cell_of_each_notebook_installs_the_repository_clone_that_contains_it(monkeypatch):
    commands = install(None, monkeypatch)
    assert len(commands) == len(EXERCISES)
    for command in commands:
        *words, folder = command.split()
        assert words == ["pip", "install", "--quiet"]
        assert (FOLDER / folder).resolve() == PROJECT


def test_first_notebook_cell_raises_an_error_if_the_repository_clone_is_missing(
    tmp_path, monkeypatch
):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"CLONE is '../..', but .* is not a clone"):
        install(tmp_path / "a" / "b", monkeypatch)


@pytest.mark.slow
def test_exercise_answers_that_keep_induction_or_worsen_all_tokens_get_no_points(tmp_path):
    """The edit removes one of two induction heads. The config removes the previous-token heads."""
    source = (FOLDER / "solutions" / "induction_heads.py").read_text()
    for old, new in (
        ("return scaled_heads(jnp.ones(harmless.shape).at[head].set(0))", FIXED),
        ("replace(config, window=(2, 4))", "replace(config, window=(1, None))"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "wrong.py").write_text(source)
    status, points, _, said = graded(tmp_path / "wrong.py")
    assert status == 1, said
    lost = [title[0] for title, (got, _) in points.items() if not got]
    assert lost == ["5", "6"], said


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "does not exist"),
        ("{}", "is not a notebook"),
        (json.dumps({"cells": []}), "has no title of an exercise, such as '# Lecture 10'"),
    ],
)
def test_grader_names_a_file_that_it_cannot_read(text, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from student import Submission

    path = tmp_path / "mine.ipynb"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Submission(path)


def test_failing_notebook_cell_does_not_stop_later_cells(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from student import Submission

    path = tmp_path / "mine.py"
    path.write_text("# %% [markdown]\n# # Lecture 10: mine\n# %%\n1 / 0\n# %%\ndef f(): return 7\n")
    found = Submission(path)
    assert found.exercise == "lecture_10" and found.f() == 7
    with pytest.raises(
        AssertionError, match="does not define `g`; cells failed: ZeroDivisionError"
    ):
        _ = found.g
