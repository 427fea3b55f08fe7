"""Script that writes the notebooks of the exercises from the files in solutions/.

    python docs/exercises/build.py

A file in solutions/ has cells that begin with `# %%` or `# %% [markdown]`. In the notebook, the
lines between `# solution` and `# end` are replaced by `raise NotImplementedError`, and
`pass  # %pip …` becomes the command `%pip …`.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
_SOLUTION = re.compile(r"^( *)# solution\n.*?^ *# end\n", re.DOTALL | re.MULTILINE)


def cells(source: str) -> list[tuple[str, str]]:
    """Returns (type, text) of each cell: "markdown" or "code".

    Args:
        source: The text of a file in solutions/.
    """
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        kind, _, text = part.partition("\n")
        if kind.strip() == "[markdown]":
            found.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()))
        else:
            found.append(("code", text.strip()))
    return found


def without_solutions(source: str) -> str:
    """Replaces each solution by a gap.

    Args:
        source: The text of a file in solutions/.
    """
    source = source.replace("pass  # %", "%").replace("  # noqa: F401", "")
    return _SOLUTION.sub(lambda gap: f"{gap[1]}raise NotImplementedError\n", source)


def notebook(source: str) -> str:
    """Returns the notebook of an exercise file, as JSON.

    Args:
        source: The text of a file in solutions/.
    """
    content = []
    for number, (kind, text) in enumerate(cells(without_solutions(source))):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        content.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": content, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def notebooks() -> dict[Path, str]:
    """Returns {path of a notebook: its content}."""
    sources = sorted((FOLDER / "solutions").glob("*.py"))
    return {
        FOLDER / f"{source.stem.replace('_', '-')}.ipynb": notebook(source.read_text())
        for source in sources
    }


if __name__ == "__main__":
    for path, content in notebooks().items():
        path.write_text(content)
