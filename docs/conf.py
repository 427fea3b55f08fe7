"""Configuration of the documentation site: `sphinx-build -WE -c docs . build/site`.

`-W` makes a warning an error. `-E` reads all pages, because Sphinx does not repeat the warnings
about a page that it has read before.

The source folder is the repository's root, so that a link between pages works on the site as it
does on GitHub.
`docs/README.md` lists the lessons and guides, in the order of the sidebar. `reference.py` writes
the pages of the API reference.
"""

import re
import shutil
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.writers.html5 import HTML5Translator

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import reference  # noqa: E402 (found by the line above)

project = html_title = "jaxformer"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/exercises/*.md",
    "experiments/*.md",
    "tests/*.md",
]
exclude_patterns = [".*", "build", "jaxformer", "runs"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
# Code blocks without a language contain formulas.
highlight_language = "text"
# Sphinx must not convert straight quotes, because many quoted words are arguments.
smartquotes_action = "D"
nitpicky = True
# References to types are not checked, because most of these types belong to other packages.
nitpick_ignore_regex = [("py:(class|data|exc)", ".*")]

# `setup` registers this renderer, which needs neither scripts nor a network.
html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the contents of the sidebar to the start page.

    Args:
        app: The application.
        page: The name of the page that Sphinx reads.
        source: A list whose only element, the text of the page, is extended in place.
    """
    if page != root_doc:
        return
    for section in (DOCS / "README.md").read_text().split("\n## ")[1:]:
        links = re.findall(r"^- \[(.+?)\]\((.+?)\.md\)", section, re.MULTILINE)
        source[0] += _contents(
            section.split()[0], (f"{text} <docs/{name}>" for text, name in links)
        )
    source[0] += _contents("Reference", (f"docs/api/{name}" for name in reference.pages()))
    others = ("docs/README", "CONTRIBUTING", "experiments/README", "tests/README")
    source[0] += _contents("Project", others)


def _contents(title: str, entries: Iterable[str]) -> str:
    """Returns a section of the sidebar as a directive."""
    lines = "\n".join(entries)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Copies the linked files to the same paths of the site, so that links to them stay valid.

    The function also copies files that differ from a linked file only in their suffix.

    Args:
        app: The application.
        doctree: A page. Sphinx represents each link to a file that is not a page by a download
            node.
    """
    for node in list(doctree.findall(download_reference)):
        _, path = app.env.relfn2path(node["reftarget"])
        for file in Path(path).parent.glob(f"{Path(path).stem}.*"):
            copy = app.outdir / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        node.replace_self(nodes.reference("", "", *node.children, refuri=node["reftarget"]))


def write_formula(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula as MathML, which browsers typeset.

    Args:
        writer: The writer of the page.
        node: The formula, in LaTeX.
    """
    is_block = isinstance(node, nodes.math_block)
    formula = convert(node.astext(), display="block" if is_block else "inline")
    # A wide formula scrolls on a narrow screen.
    writer.body.append(f'<div class="formula">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def finish(app: Sphinx, error: Exception | None) -> None:
    """Copies the start page to index.html, which browsers and servers open, and checks the site."""
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")
        for page in app.outdir.rglob("*.html"):
            for problem in problems(page):
                getLogger(__name__).warning("%s: %s", page.relative_to(app.outdir), problem)


def problems(page: Path) -> list[str]:
    """Returns the links of a built page to files that do not exist or that need a network.

    Links of the text to other sites are allowed; scripts, styles, fonts and pictures are not.
    """
    found = []

    def check(tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for link in (value for name, value in attributes if name in ("href", "src") and value):
            path = re.split("[?#]", link)[0]
            if re.match(r"(https?:)?//", link):
                found.extend([f"{link} needs a network connection"] if tag != "a" else [])
            elif not link.startswith("data:") and not (page.parent / path).exists():
                found.append(f"{link} does not exist")

    parser = HTMLParser()
    parser.handle_starttag = check
    parser.feed(page.read_text())
    return found


def setup(app: Sphinx) -> None:
    """Writes the pages of the reference and connects the functions to the events of the build."""
    reference.write_pages(DOCS / "api")
    renderers = (write_formula, None)
    app.add_html_math_renderer("mathml", renderers, renderers)
    app.connect("source-read", add_navigation)
    # Because of its priority, `link_files` runs before Sphinx copies downloads.
    app.connect("doctree-read", link_files, priority=400)
    app.connect("build-finished", finish)
    app.connect("autodoc-process-docstring", reference.convert_docstring, priority=400)
    app.connect("autodoc-process-signature", reference.shorten_signature)
    app.connect("autodoc-process-bases", reference.keep_own_bases)
    app.connect("autodoc-skip-member", reference.skip_member)
