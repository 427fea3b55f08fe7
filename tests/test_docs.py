"""The lessons say what their code prints, and show pictures that are there."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.slow import mostly_slow

FOLDER = Path(__file__).parents[1] / "docs"


def script(name):
    """One of the scripts beside the lessons, as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [path.name for path in sorted(FOLDER.glob("*.md"))]


@pytest.mark.parametrize("name", mostly_slow(PAGES, "lecture-10.md"))
def test_a_lesson_shows_what_its_code_prints(name):
    page = FOLDER / name
    assert script("run").refreshed(page) == page.read_text()


@pytest.mark.parametrize("name", PAGES)
def test_what_a_lesson_points_to_is_there(name):
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


def test_the_sliders_show_what_layer_norm_gives():
    """γ (x − μ) / √(σ² + ε) + β at every place, and in the page that is committed."""
    lesson = script("layer_norm_page")
    assert f'src="{lesson.VALUES.name}"' in (FOLDER / "layer-norm.html").read_text()
    shown = json.loads(lesson.VALUES.read_text().removeprefix("const values = ").rstrip(";\n"))
    x = np.array(shown["input"])
    normalised = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    scales, biases = (np.array(shown[name]) for name in ("scales", "biases"))
    expected = scales[:, None, None] * normalised + biases[:, None]
    np.testing.assert_allclose(shown["outputs"], expected, atol=6e-4)
    made = json.loads(lesson.script().removeprefix("const values = ").rstrip(";\n"))
    assert made["input"] == shown["input"]
    np.testing.assert_allclose(made["outputs"], shown["outputs"], atol=6e-4)
