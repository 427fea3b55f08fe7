"""Pages show the actual output of their code, and their links and pictures exist."""

import ast
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer import functional
from jaxformer.functional.attention import tokamax
from jaxformer.functional.cache import slots

FOLDER = Path(__file__).parents[1] / "docs"


def script(name):
    """Imports a script from docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [path.name for path in sorted(FOLDER.glob("*.md"))]


@pytest.fixture
def dedented_docstrings(monkeypatch):
    """Cleans the package's docstrings as Python 3.13 does, so that no page depends on the
    version."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jaxformer."):
            for value in vars(module).values():
                if inspect.isfunction(value) and value.__doc__:
                    monkeypatch.setattr(value, "__doc__", inspect.cleandoc(value.__doc__))


@pytest.fixture
def without_tokamax(monkeypatch):
    """Runs the pages as if tokamax were not installed, because their output assumes so."""
    monkeypatch.setattr(tokamax, "missing", lambda: f"tokamax is not installed ({tokamax.INSTALL})")


@pytest.mark.usefixtures("dedented_docstrings", "quick_compilation", "without_tokamax")
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "lecture-10.md" else pytest.mark.slow) for x in PAGES],
)
def test_docs_page_shows_the_output_of_its_code(name):
    page = FOLDER / name
    assert script("run").refreshed(page) == page.read_text()


def without_types(code):
    """Returns the syntax tree of functions without docstrings, annotations and decorators."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            if ast.get_docstring(node):
                del node.body[0]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return tree


def test_definitions_on_lesson_pages_equal_the_source_of_the_library():
    """A ```py block shows functions of the library, each with at most ten lines after the first."""
    shown = {}
    for name in (x for x in PAGES if x.startswith("lecture")):
        for block in re.findall(r"```py\n(.*?)```", (FOLDER / name).read_text(), re.DOTALL):
            shown |= {node.name: node for node in ast.parse(block).body}
    assert {"explicit_attention", "layer_norm", "transformer_block"} <= shown.keys()
    for name, node in shown.items():
        function = getattr(functional, name, None) or getattr(slots, name)
        (source,) = without_types(inspect.getsource(inspect.unwrap(function))).body
        assert ast.dump(node) == ast.dump(source), name
        assert node.end_lineno - node.body[0].lineno < 10, name


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_and_tests_named_on_a_docs_page_exist(name):
    text = (FOLDER / name).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`((?:tests|experiments|docs|functional|training)/[\w/.]+)[`:]", text)
    named += re.findall(r"`python ([\w/.]+)", text)
    roots = (FOLDER.parent, FOLDER.parent / "jaxformer")
    for link in links:
        assert (FOLDER / link).exists(), link
    for path in named:
        assert any((root / path).exists() for root in roots), path
    for path, test in re.findall(r"`(tests/[\w/.]+)::(\w+)`", text):
        assert f"def {test}(" in (FOLDER.parent / path).read_text(), test


def test_slider_on_docs_page_has_a_label_and_a_spoken_value():
    """Otherwise a screen reader would read the slider's index into its table of values."""
    for page in FOLDER.glob("*.html"):
        text = page.read_text()
        sliders = re.findall(r'<input id="(\w+)" type="range">', text)
        assert len(sliders) == text.count('type="range"')
        for name in sliders:
            assert f'<label for="{name}">' in text and f'["{name}", values.' in text
        assert not sliders or 'find(id).setAttribute("aria-valuetext"' in text


@pytest.mark.slow
def test_values_on_the_layer_norm_slider_page_equal_layer_norm():
    """The committed values equal γ (x − μ) / √(σ² + ε) + β and the output of the script."""
    lesson = script("layer_norm_page")
    assert f'src="{lesson.VALUES.name}"' in (FOLDER / "layer-norm-sliders.html").read_text()
    shown = json.loads(lesson.VALUES.read_text().removeprefix("const values = ").rstrip(";\n"))
    x = np.array(shown["input"])
    normalised = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    scales, biases = (np.array(shown[name]) for name in ("scales", "biases"))
    expected = scales[:, None, None] * normalised + biases[:, None]
    np.testing.assert_allclose(shown["outputs"], expected, atol=6e-4)
    made = json.loads(lesson.script().removeprefix("const values = ").rstrip(";\n"))
    assert made["input"] == shown["input"]
    np.testing.assert_allclose(made["outputs"], shown["outputs"], atol=6e-4)


def test_docs_readme_lists_every_docs_page():
    """The sidebar of the site shows the pages of this list."""
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(("README.md", *listed)) == sorted((*PAGES, "exercises/README.md"))
