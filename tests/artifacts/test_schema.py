"""config.json is read through a closed schema, which is the annotations of the config classes."""

import json
import re
import sys
from dataclasses import asdict, fields, replace
from typing import get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.artifacts.run import Origin, RunFolder, parse_config, parse_kind, read_sections
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.cli import main
from jaxformer.models.config import KINDS, PRESETS, Execution, RotaryScaling, kind_of
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.config import Inputs, MeshSizes, OptimizerConfig, TextTraining
from jaxformer.training.log import require_trackers
from jaxformer.training.presets import RUNS, TRAININGS
from jaxformer.training.run_folders import read_run, write_run
from tests.errors import error_of
from tests.slow import mostly_slow

MODELS = [kind() for kind in KINDS.values()]
PARTS = [Execution(), OptimizerConfig(), LoraConfig(), MeshSizes(), RotaryScaling("linear", 2.0)]
RUNS_OF = [TRAININGS[kind_of(model)](model) for model in MODELS]
CONFIGS = [*MODELS, *PARTS, SpecialTokens(), *RUNS_OF[:2], RUNS_OF[2]]
NESTED = ("Execution", "OptimizerConfig", "LoraConfig", "MeshSizes", "RotaryScaling")
# A value of each JSON type, and the words of the annotations that accept it.
JUNK = [
    (None, ("NoneType", "None")),
    (True, ("bool",)),
    (7, ("int", "float")),
    (0.5, ("float",)),
    (float("nan"), ()),
    (10**5000, ()),
    ("junk", ("str",)),
    ([], ("tuple",)),
    ([True], ()),
    (["junk"], ()),
    ([[7]], ()),
    ([10**5000], ()),
    ({}, NESTED),
    ({"junk": {"junk": []}}, ()),
    (json.loads("[" * 500 + "]" * 500), ()),
]


QUICK = ("RecurrentConfig", "RotaryScaling", "OptimizerConfig", "HiddenTraining")
EACH = pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            x, id=type(x).__name__, marks=[pytest.mark.slow] * (type(x).__name__ not in QUICK)
        )
        for x in CONFIGS
    ],
)


def fields_of(config):
    """Yields (name, words of its annotation without the choices, plain values of all fields)."""
    hints = get_type_hints(type(config))
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    for field in fields(config):
        hint = re.sub(r"Literal\[.*?\]", "Choice", str(hints[field.name]))
        yield field.name, set(re.findall(r"\w+", hint)), plain


@EACH
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(config):
    """The file's reader and the constructor refuse it; neither converts it."""
    for name, words, plain in fields_of(config):
        for value, room in JUNK:
            if words.intersection(room):
                continue
            error = error_of(parse_config, type(config), {**plain, name: value}, "FILE")
            assert error.startswith(f"FILE: {name}") and len(error) < 300, error
        with pytest.raises(ValueError, match=name):
            replace(config, **{name: [[7]]})


@EACH
def test_an_infinite_or_huge_number_is_refused(config):
    """Only the bound of the gradient norm may be infinite: gradients are then not clipped."""
    for name, words, plain in fields_of(config):
        values = [2.0**1023 * 2] * ("float" in words and name != "clip_norm")
        values += [2**40, 2**31, -1] * ("int" in words)
        values += [4097] * (name in ("num_layers", "num_encoder_layers"))
        for value in values:
            if (name == "seed" and value == 2**31) or (
                isinstance(config, SpecialTokens) and value < 0
            ):
                continue
            error = error_of(parse_config, type(config), {**plain, name: value}, "FILE")
            assert name in error


@EACH
def test_a_scalar_of_numpy_or_jax_is_a_number(config):
    """The config stores Python's type, which JSON can write."""
    kinds = {bool: (np.bool_,), int: (np.int64, np.uint16, jnp.int32)}
    kinds |= {float: (np.float32, np.float16, jnp.float32, np.array), str: (np.str_,)}
    for field in fields(config):
        value = getattr(config, field.name)
        for kind in kinds.get(type(value), ()):
            given = replace(config, **{field.name: kind(value)})
            found = getattr(given, field.name)
            assert type(found) is type(value)
            assert found == value if kind is np.str_ else np.isclose(found, value, 1e-3)
            json.dumps(asdict(given))


@EACH
def test_a_key_that_is_no_field_is_refused(config):
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    error = error_of(parse_config, type(config), {**plain, "evil\x1b": 1}, "FILE")
    assert error.startswith(r"FILE: 'evil\x1b' is no field of ")


@pytest.fixture
def run(tmp_path):
    """A run before its first step: only its config exists."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    model = KINDS["decoder"](
        max_length=32, positions="rotary", rotary_base=(1e4, None), window=(8, None)
    )
    write_run(folder, Inputs(), TextTraining(model))
    return folder


def changed(run, *path, value):
    """Sets the value at that path of the run's config."""
    content = inner = json.loads(run.config.read_text())
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    run.config.write_text(json.dumps(content))
    return run


@pytest.mark.parametrize(
    "path, value",
    [
        (("training", "optimizer", "schedule"), "constant"),
        (("training", "packing"), "anything"),
        (("training", "trackers"), ["evil"]),
        (("training", "trackers"), "wandb"),
        (("training", "mesh"), {"data": True}),
        (("training", "steps"), "1e3"),
        (("training", "seed"), False),
        (("training", "text_field"), "\x1b]0;PWNED\x07"),
        (("training", "execution", "attention"), ["fused"]),
        (("training", "lora", "lora_maps"), ["query"]),
        (("training", "lora", "lora_rank"), 2.0),
        (("training", "model"), {}),
        (("training", "extra"), None),
        (("training", "optimizer"), None),
        (("model", "rotary_scaling"), {"kind": "linear", "factor": [2.0]}),
        (("model", "rotary_scaling"), [{"kind": "linear"}]),
        (("model", "dtype"), 32),
        (("model",), []),
        (("kind",), ["decoder"]),
        (("text",), "book.txt"),
        (("text",), [7]),
        (("source",), {}),
        (("from",), {"path": "/there"}),
        (("from",), {"path": "/there", "digest": 3}),
        (("family",), 7),
        (("special_tokens",), []),
        (("plugins",), {}),
        (("format",), True),
    ],
    ids=lambda x: ".".join(x) if isinstance(x, tuple) else None,
)
def test_a_wrong_config_of_a_run_is_refused_by_file_and_key(run, path, value):
    error = error_of(read_run, changed(run, *path, value=value))
    assert error.startswith(str(run.config)) and path[-1] in error


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1" * 5000, "[" * 90_000])
def test_a_number_that_json_does_not_have_is_refused(run, text):
    """So are a number of 5,000 digits and deeply nested lists. The error is one short line."""
    content = run.config.read_text()
    run.config.write_text(re.sub(r'("norm_epsilon": )[^,]*', rf"\g<1>{text}", content))
    error = error_of(read_run, run)
    assert error.startswith(str(run.config)) and len(error) < 300
    assert "norm_epsilon" in error or text.startswith("[")


def test_a_module_that_a_run_names_is_not_imported(run, tmp_path, monkeypatch, capsys):
    """A run can name only trackers of a fixed table."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    changed(run, "training", "trackers", value=["evil"])
    assert main(["train", "--resume", "--out", str(run.path), "--steps", "2000"]) == 2
    assert "trackers is ['evil']; it must be" in capsys.readouterr().err
    assert "tracker is 'evil'" in error_of(require_trackers, ("evil",))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "decoder"))
def test_a_written_run_is_read_back(kind, tmp_path):
    """For every default and every preset, with the origin of the run."""
    models = [KINDS[kind](), *(x for x in PRESETS.values() if kind_of(x) == kind)]
    trainings = [TRAININGS[kind](model) for model in models]
    trainings += [kinds[kind] for kinds in RUNS.values() if kind in kinds]
    origin = Origin(tmp_path, "0", "bert", {"stop_tokens": [3, 4], "begin": 1})
    for number, config in enumerate(trainings):
        config = replace(config, mesh=MeshSizes(), lora=LoraConfig(lora_rank=2))
        config = replace(config, optimizer=replace(config.optimizer, clip_norm=float("inf")))
        folder = RunFolder(tmp_path / str(number))
        folder.path.mkdir()
        inputs = Inputs((tmp_path / "text\x1b",), tmp_path, None, origin if number else None)
        write_run(folder, inputs, config)
        assert read_run(folder) == (inputs, config)
        sections = read_sections(folder.path)
        assert parse_kind(sections, folder.config) == config.model
