"""Grades a student's file: `pytest docs/exercises --student FILE` prints a table of points."""

from pathlib import Path

import pytest
from student import Submission

_KEY = pytest.StashKey[Submission]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option --student."""
    parser.addoption("--student", metavar="FILE", help="the notebook or script to grade")


def pytest_configure(config: pytest.Config) -> None:
    """Reads and runs the student's file."""
    config.addinivalue_line("markers", "points(n): points of an exercise")
    path = config.getoption("--student")
    if path is None:
        raise pytest.UsageError("--student is missing; give the notebook to grade")
    try:
        config.stash[_KEY] = Submission(Path(path))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests of the student's exercise, and notes the points of each test."""
    exercise = config.stash[_KEY].exercise
    chosen = [x for x in items if x.path.stem == f"test_{exercise}"]
    config.hook.pytest_deselected(items=[x for x in items if x not in chosen])
    items[:] = chosen
    for item in chosen:
        mark = item.get_closest_marker("points")
        title = (getattr(item, "function", None).__doc__ or item.name).partition("\n")[0]
        item.user_properties += [("points", mark.args[0]), ("title", title)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the points of each exercise and their sum."""
    rows = []
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            known = dict(report.user_properties)
            rows.append((known["title"], known["points"] * (outcome == "passed"), known["points"]))
    terminalreporter.section("points")
    for title, points, most in sorted(rows):
        terminalreporter.write_line(f"{points} of {most}  {title}")
    total, most = (sum(row[column] for row in rows) for column in (1, 2))
    terminalreporter.write_line(f"{total} of {most} points")


@pytest.fixture
def student(pytestconfig: pytest.Config) -> Submission:
    """The functions of the student's file."""
    return pytestconfig.stash[_KEY]
