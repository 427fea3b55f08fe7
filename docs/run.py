"""Run the Python of the lessons, page by page, and see that it prints what they show.

    python docs/run.py              # exit status 1, and which block, if one prints something else
    python docs/run.py --write      # put in what the blocks print

A page is one program: its ```python blocks run in order, in one namespace, and what a block prints
stands in the ```text block right after it.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)


def pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def refreshed(page: Path) -> str:
    """The page's text with what its blocks print put in."""
    namespace = {"__name__": page.stem}

    def run(block) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"{page.name}", "exec"), namespace)
        shown = f"\n```text\n{printed.getvalue().rstrip()}\n```\n" if printed.getvalue() else ""
        return f"```python\n{block['code']}```\n{shown}"

    with contextlib.chdir("."):  # a page may go elsewhere
        return BLOCK.sub(run, page.read_text())


def main(arguments: list[str]) -> int:
    wrong = []
    for page in pages():
        text = refreshed(page)
        if text != page.read_text():
            wrong.append(page.name)
            if arguments == ["--write"]:
                page.write_text(text)
    print(
        f"{len(pages())} pages, {len(wrong)} of them {'changed' if arguments else 'wrong'}", *wrong
    )
    return 1 if wrong and not arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
