"""The values in config.json must match the annotations of the config classes."""

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
from jaxformer.models.config import KINDS, PRESETS, Execution, RotaryScaling, architecture_name
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training.config import Inputs, MeshSizes, OptimizerConfig, TextTraining
from jaxformer.training.log import require_trackers
from jaxformer.training.presets import RUNS, TRAININGS
from jaxformer.training.run_folders import read_run, write_run
from tests.errors import error_of
from tests.slow import mostly_slow

MODELS = [kind() for kind in KINDS.values()]
PARTS = [Execution(), OptimizerConfig(), LoraConfig(), MeshSizes(), RotaryScaling("linear", 2.0)]
RUNS_OF = [TRAININGS[architecture_name(model)](model) for model in MODELS]
CONFIGS = [*MODELS, *PARTS, SpecialTokens(), *RUNS_OF[:2], RUNS_OF[2]]
NESTED = ("Execution", "OptimizerConfig", "LoraConfig", "MeshSizes", "OwnNames", "RotaryScaling")
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


QUICK = ("RecurrentConfig", "RotaryScaling", "OptimizerConfig", "MaskedTokensTraining")
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
def test_config_json_value_of_wrong_type_is_rejected_with_field_name(config):
    """The reader and the constructor reject a value of the wrong type without converting it."""
    for name, words, plain in fields_of(config):
        for value, room in JUNK:
            if words.intersection(room):
                continue
            error = error_of(parse_config, type(config), {**plain, name: value}, "FILE")
            assert error.startswith(f"FILE: {name}") and len(error) < 300, error
        with pytest.raises(ValueError, match=name):
            replace(config, **{name: [[7]]})


@EACH
def test_config_rejects_infinite_and_huge_numbers(config):
    """Only the limit of the gradient norm may be infinite, which disables clipping."""
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
def test_config_accepts_numpy_and_jax_scalars(config):
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
def test_unknown_config_key_is_rejected(config):
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    error = error_of(parse_config, type(config), {**plain, "evil\x1b": 1}, "FILE")
    assert error == rf"FILE: {type(config).__name__} has no field 'evil\x1b'; remove it"


@EACH
def test_error_for_misspelled_config_field_suggests_the_correct_name(config):
    """The error for a field name with a missing letter suggests the correct name."""
    for name in (x.name for x in fields(config) if len(x.name) > 4):
        error = error_of(parse_config, type(config), {name[:2] + name[3:]: 1}, "FILE")
        assert re.search(r"has no field '\w+'; did you mean \w+\?$", error), (name, error)


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
        (("training", "lora", "lora_target_modules"), ["query"]),
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
        (("init_from",), {"path": "/there"}),
        (("init_from",), {"path": "/there", "digest": 3}),
        (("model_type",), 7),
        (("special_tokens",), []),
        (("plugins",), {}),
        (("format",), True),
    ],
    ids=lambda x: ".".join(x) if isinstance(x, tuple) else None,
)
def test_invalid_run_config_is_rejected_with_file_and_key(run, path, value):
    error = error_of(read_run, changed(run, *path, value=value))
    assert error.startswith(str(run.config)) and path[-1] in error


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1" * 5000, "[" * 90_000])
def test_config_json_with_invalid_number_is_rejected(run, text):
    """NaN, numbers of 5,000 digits and deeply nested lists give an error of one short line."""
    content = run.config.read_text()
    run.config.write_text(re.sub(r'("norm_epsilon": )[^,]*', rf"\g<1>{text}", content))
    error = error_of(read_run, run)
    assert error.startswith(str(run.config)) and len(error) < 300
    assert "norm_epsilon" in error or text.startswith("[")


def test_modules_named_in_run_config_are_not_imported(run, tmp_path, monkeypatch, capsys):
    """The config of a run can select only trackers from a fixed table."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    changed(run, "training", "trackers", value=["evil"])
    assert main(["train", "--resume", "--out", str(run.path), "--steps", "2000"]) == 2
    assert "trackers is ['evil']; it must be" in capsys.readouterr().err
    assert "tracker is 'evil'" in error_of(require_trackers, ("evil",))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "decoder"))
def test_written_run_config_is_read_unchanged(kind, tmp_path):
    """A written config is read unchanged, for every default and preset, with its origin."""
    models = [KINDS[kind](), *(x for x in PRESETS.values() if architecture_name(x) == kind)]
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
