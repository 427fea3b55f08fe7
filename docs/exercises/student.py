"""Runs the notebook or script of a student and returns its functions."""

import json
import re
from pathlib import Path
from typing import Any


class Submission:
    """The names that a student's file defines.

    Attributes:
        exercise: The name of the exercise from the title of the file, such as lecture_10.
        names: {name: value} after all cells have run.
        errors: The error messages of the cells that failed.
    """

    def __init__(self, path: Path) -> None:
        """Runs each cell of a notebook, or a Python file. A failed cell does not stop the others.

        Args:
            path: The path of the file.

        Raises:
            ValueError: The file cannot be read, or its title does not name an exercise.
        """
        cells = _cells(path)
        titles = re.findall(r"^#? ?# ([^#:\n]+)", "\n".join(cells), re.MULTILINE)
        names = (title.strip().lower().replace(" ", "_") for title in titles)
        known = {x.stem.removeprefix("test_") for x in Path(__file__).parent.glob("test_*.py")}
        self.exercise = next((name for name in names if name in known), None)
        if self.exercise is None:
            raise ValueError(f"{path} has no title of an exercise, such as '# Lecture 10'")
        self.errors: list[str] = []
        self.names: dict[str, Any] = {"__name__": "student"}
        for text in cells:
            try:
                exec(compile(_without_magics(text), str(path), "exec"), self.names)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def __getattr__(self, name: str) -> Any:
        """Returns a function that the student wrote in the notebook.

        Raises:
            AssertionError: The file does not define the name.
        """
        if name not in self.names:
            failed = f"; cells failed: {'; '.join(self.errors)}" if self.errors else ""
            raise AssertionError(f"the file does not define `{name}`{failed}")
        return self.names[name]


def _cells(path: Path) -> list[str]:
    """Returns the texts of the cells; the text of a Markdown cell becomes a comment."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return re.split(r"^(?=# %%)", text, flags=re.MULTILINE)
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a notebook: {type(error).__name__}: {error}") from None
    return [x if kind == "code" else re.sub("^", "# ", x, flags=re.M) for kind, x in sources]


def _without_magics(text: str) -> str:
    """Replaces commands of IPython, such as `%pip install`, by `pass`."""
    return re.sub(r"^( *)[%!].*$", r"\1pass", text, flags=re.MULTILINE)
