"""Editors and type checkers find the types of the public names."""

import json
import re
import shutil
import subprocess
import typing
from importlib.resources import files
from pathlib import Path

import pytest

from jaxformer.models.config.presets import PRESETS, preset
from jaxformer.models.kinds import MODELS

PROJECT = Path(__file__).parents[1]
SETTINGS = f"""
[tool.pyright]
extraPaths = ["{PROJECT}"]
[tool.pyrefly]
search-path = ["{PROJECT}"]
"""
RIGHT = """
import dataclasses

import jax
import jaxformer as jf

config = dataclasses.replace(jf.preset("gpt2-124m"), num_layers=2, positions="rotary")
model = jf.Decoder(config, execution=jf.Execution(remat="full"))
variables = model.init(jax.random.key(0), jax.numpy.ones((1, 4), int))
out = jf.generate(model, variables, [[1], [2, 3]], max_new_tokens=4, sampler=jf.Sampler(top_k=5))
lengths: list[int] = out.lengths.tolist()
best = jf.beam_search(model, variables, [[1]], max_new_tokens=4).scores
width = model.config.embed_dim + jf.preset("transformer-base").embed_dim
batch = jf.interpret.repeated_batch(9, length=8, num_sequences=4)
atlas = jf.interpret.head_atlas(model, variables, batch)
probabilities = jf.functional.softmax(jax.numpy.ones(3))
trained, step = jf.training.fit.fit, jf.training.step.make_step
config_of_a_run = jf.training.config.RunConfig(config, steps=5)
"""
# Each line that begins with "wrong" contains one type error.
WRONG = """
import jax
import jaxformer as jf

config = jf.preset("gpt2-124m")
model = jf.Decoder(config)
wrong_name = jf.generat
wrong_field = model.config.num_layerz
wrong_field_of_a_preset = jf.preset("llama-1.1b").num_encoder_layers
wrong_config = jf.Decoder(jf.EncoderConfig())
wrong_choice = jf.Execution(attention="fast")
wrong_argument = jf.generate(model, {}, [[1]], max_new_token=4)
wrong_type = jf.Sampler(temperature="hot")
wrong_result = jf.generate(model, {}, [[1]], max_new_tokens=4).token
wrong_name_in_a_room = jf.interpret.patch_sweeep
wrong_name_in_a_module = jf.training.step.make_stepp
wrong_argument_in_a_room = jf.interpret.logit_lens(model, {}, [[1]], positoin=1)
wrong_argument_of_a_checked_function = jf.functional.rms_norm(jax.numpy.ones(3), gama=2)
wrong_result_of_a_room = jf.interpret.repeated_batch(9, 8, 4).targetz
"""


def _pyrefly(folder: Path, name: str) -> set[int]:
    """Returns the line numbers of a file that have an error."""
    command = ["pyrefly", "check", "--output-format", "json", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return {error["line"] for error in json.loads(done.stdout)["errors"]}


def _pyright(folder: Path, name: str) -> set[int]:
    command = ["pyright", "--outputjson", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {x["range"]["start"]["line"] + 1 for x in found if x["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("lines_with_errors", [_pyrefly, _pyright])
def test_type_checkers_report_exactly_the_lines_with_type_errors(lines_with_errors, tmp_path):
    checker = lines_with_errors.__name__.strip("_")
    if shutil.which(checker) is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    blocks = re.findall("```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert blocks
    # The README names a checkpoint with a tokenizer; the type of `load` allows None.
    blocks = [x.replace("\nprompt =", "\nassert tokenizer is not None\nprompt =") for x in blocks]
    for number, text in enumerate((*blocks, RIGHT, WRONG)):
        (tmp_path / f"script{number}.py").write_text(text)
        expected = {i for i, line in enumerate(text.splitlines(), 1) if line.startswith("wrong")}
        assert lines_with_errors(tmp_path, f"script{number}.py") == expected, text


def test_type_checkers_infer_the_config_type_of_each_preset():
    hints = [typing.get_type_hints(one) for one in typing.get_overloads(preset)]
    named = {x: hint["return"] for hint in hints for x in typing.get_args(hint["name"])}
    assert named == {name: type(config) for name, config in PRESETS.items()}


@pytest.mark.parametrize("config", MODELS)
def test_type_checkers_infer_the_type_of_the_config_of_each_model(config):
    assert typing.get_type_hints(MODELS[config])["config"] is config


def test_the_package_contains_py_typed():
    """Without this file, type checkers ignore the annotations of an installed package."""
    assert files("jaxformer").joinpath("py.typed").is_file()
