"""Files that pages, scripts and comments name exist, and CONTRIBUTING.md's tables agree."""

import re
import subprocess
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import pytest

import jaxformer as jf
from jaxformer.functional.layers.feedforward import ACTIVATIONS
from jaxformer.hub.families import FAMILIES
from jaxformer.hub.gguf import ARCHITECTURES
from jaxformer.models import kinds
from jaxformer.models.builders.parts import build_norm
from jaxformer.models.config import KINDS, transformer
from jaxformer.training.presets import RUNS, TRAININGS

PROJECT = Path(__file__).parents[1]
TEXT = (PROJECT / "CONTRIBUTING.md").read_text()
PAGE = (PROJECT / "docs" / "checkpoints.md").read_text()
EXPORT_PAGE = (PROJECT / "docs" / "export.md").read_text()


def test_paths_and_names_mentioned_in_contributing_md_exist():
    """Every path exists, and every other name of a step occurs in a file that the step names."""
    paths = re.findall(r"`((?:jaxformer|tests|docs|experiments)/[\w/.-]+)`", TEXT)
    assert len(paths) > 40
    for path in paths:
        assert (PROJECT / path).exists(), path
    steps = re.split(r"\n(?=\d+\. )|\n\n", TEXT)
    for step in steps:
        files = [x for x in re.findall(r"`([\w/.-]+\.py)`", step) if (PROJECT / x).is_file()]
        text = "".join((PROJECT / x).read_text() for x in files)
        for name in re.findall(r"`([A-Z_]{4,}|_[A-Z]{3,}|[a-z]+_[a-z_]+)`", step):
            assert not files or name in text, (name, files)


def test_every_file_path_mentioned_in_the_project_exists():
    """`.ci/newest` once named a test file that had been renamed, and pytest ran nothing."""
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    path = re.compile(r"(?<![\w/.-])(?:jaxformer|tests|docs|experiments)/[a-z\d/_.-]+\.[a-z]+\b")
    kinds = {".py", ".md", ".toml", ".html", ".js", ".sh", ""}
    texts = [PROJECT / name for name in listed.stdout.splitlines() if Path(name).suffix in kinds]
    named = [(file, name) for file in texts for name in path.findall(file.read_text())]
    assert len(named) > 100
    missing = [f"{file.name}: {name}" for file, name in named if not (PROJECT / name).exists()]
    assert not missing


def test_model_families_listed_in_docs_match_the_code():
    rows = re.findall(r"^\| [^|]*\((`[^|]*`)\) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(named) == sorted({"model_type", *FAMILIES})  # model_type is in the heading


def test_gguf_architectures_listed_in_docs_match_the_code():
    line = re.search(r"\*\*Models\*\*: (.*?)\.\n", EXPORT_PAGE)[1]
    said = re.sub(
        r"\W+", "", line.replace("2 and 3", "2 Qwen3").replace("Gemma 3 (text)", "gemma3_text")
    ).lower()
    assert said == "".join(ARCHITECTURES)


def test_every_activation_every_norm_and_every_model_name_is_implemented():
    assert get_args(transformer.Activation) == ACTIVATIONS
    for norm in get_args(transformer.Norm):
        value = build_norm(jf.DecoderConfig(norm=norm).resolved)
        assert value is None or value(value.init(2), jnp.ones((1, 2))).shape == (1, 2)
    configs = set(KINDS.values())
    assert configs == set(kinds.MODELS)
    assert set(KINDS) == set(TRAININGS) == set(RUNS["tiny"])
