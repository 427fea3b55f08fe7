"""Script that runs the Python blocks of the pages in docs/ and compares their output.

    python docs/run.py              # exit status 1 and the names of the pages that differ
    python docs/run.py --write      # replaces the output in the pages

A page is one program: its ```python blocks run in order, in one namespace. The ```text block right
after a ```python block holds the output of that block.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)


def pages() -> list[Path]:
    """Returns the paths of all pages, sorted by name."""
    return sorted(FOLDER.glob("*.md"))


def refreshed(page: Path) -> str:
    """Runs the blocks of a page and returns its text with their current output.

    Args:
        page: The path of a Markdown page.
    """
    namespace = {"__name__": page.stem}

    def run(block) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"{page.name}", "exec"), namespace)
        shown = f"\n```text\n{printed.getvalue().rstrip()}\n```\n" if printed.getvalue() else ""
        return f"```python\n{block['code']}```\n{shown}"

    with contextlib.chdir("."):  # a page may change the working directory
        return BLOCK.sub(run, page.read_text())


def main(arguments: list[str]) -> int:
    """Checks or, with `--write`, updates all pages.

    Args:
        arguments: The command-line arguments: none, or `--write`.

    Returns:
        The exit status: 1 if the output of a page differs and is not replaced, otherwise 0.
    """
    wrong = []
    for page in pages():
        text = refreshed(page)
        if text != page.read_text():
            wrong.append(page.name)
            if arguments == ["--write"]:
                page.write_text(text)
    print(
        f"{len(pages())} pages: {len(wrong)} {'updated' if arguments else 'with different output'}",
        *wrong,
    )
    return 1 if wrong and not arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
