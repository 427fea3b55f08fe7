"""Script that runs the Python blocks of the pages in docs/ and compares their output.

    python docs/run.py                     # exit status 1 and the names of the pages that differ
    python docs/run.py --write             # replaces the output that the pages show
    python docs/run.py --write lecture-11  # replaces the output of this page only

A page is one program: its ```python blocks run in order, in one namespace. The ```text block right
after a ```python block holds the output of that block.
"""

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # Pages import docs/copying.py.
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

    with contextlib.chdir("."):  # Restores the working directory, which a page may change.
        return BLOCK.sub(run, page.read_text())


def main() -> int:
    """Checks the output that pages of docs/ show or, with `--write`, updates the output.

    Returns:
        The exit status: 1 if the output of a page differs and `--write` is not given, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {page.stem: page for page in pages()}
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help=f"{', '.join(known)}; default: all"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the printed output that the pages show"
    )
    arguments = parser.parse_args()
    for name in arguments.pages:
        if name not in known:
            parser.error(f"there is no page {name!r}; the pages are {', '.join(known)}")
    chosen, differing = arguments.pages or list(known), []
    for name in chosen:
        page = known[name]
        text = refreshed(page)
        if text != page.read_text():
            differing.append(name)
            if arguments.write:
                page.write_text(text)
    result = "updated" if arguments.write else "with different output"
    print(f"{len(chosen)} pages: {len(differing)} {result}", *differing)
    return 1 if differing and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
