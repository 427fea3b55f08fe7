"""User-defined functions by name: on the command line, in a run, and in a loaded folder."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.cli import main
from jaxformer.cli.train import read_new_run
from jaxformer.cli.train_arguments import read_selection
from jaxformer.models.parameters import parameter_count
from jaxformer.training.own_names import read_own_names
from tests.cli.conftest import SETTINGS, TEXT

MODULE = """
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

Path("imported").touch()
TABLE = [1]


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def near(query, key):
    return (key <= query) & (key > query - 4)


def waves(positions, dim):
    return jnp.sin(positions[:, None] * jnp.arange(1, dim + 1) / dim)


def total(x):
    return x.sum()


def rounds(x):
    return jnp.round(x).astype(int)


def scores(query, key):
    return key - query


def narrow(positions, dim):
    return jnp.zeros((len(positions), dim - 1))


def fails(x):
    raise TypeError("no\\nway")


def concrete(x):
    return np.asarray(x)
"""
NAMES = {"activation": "squared_relu", "mask": "near", "positions": "waves"}
FLAGS = [word for x, name in NAMES.items() for word in (f"--own-{x}", f"named_parts:{name}")]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module file in the current directory; the test imports a fresh copy of it."""
    (tmp_path / "named_parts.py").write_text(MODULE)
    (tmp_path / "broken_parts.py").write_text("import no_such_dependency\n")
    (tmp_path / "text.py").write_text(TEXT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("named_parts", "broken_parts"):
        sys.modules.pop(name, None)


def functions():
    """Returns the functions by the field of the model; changes no import path."""
    sys.path.insert(0, str(Path.cwd()))
    own = import_module("named_parts")
    sys.path.remove(str(Path.cwd()))
    return {part: getattr(own, name) for part, name in NAMES.items()}


def refused(words, capsys):
    """Runs a command that must fail, and returns the one line that it writes to standard error."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("flag", "name", "reason"),
    [
        ("activation", "named_part:total", "no module 'named_part'.* did you mean named_parts?"),
        ("activation", "named_parts:squared_rel", "no function .* did you mean squared_relu?"),
        ("activation", "named_parts:TABLE", r"is \[1\]; it must be a function"),
        ("activation", "pathlib:Path", "it must be a function"),
        ("activation", "broken_parts:f", "ModuleNotFoundError: No module named 'no_such_depend"),
        ("activation", "relu", "must be MODULE:FUNCTION"),
        ("activation", "named_parts:total", r"returns float32 \[\] .* must return float \[2, 3\]"),
        ("activation", "named_parts:rounds", r"returns int32 .* must return float"),
        ("activation", "named_parts:fails", "raised an error: TypeError: no"),
        ("activation", "named_parts:concrete", "raised an error: Tracer"),
        ("mask", "named_parts:scores", r"returns int32 \[2, 3\] .* must return bool"),
        ("positions", "named_parts:narrow", r"\[3, 63\] .* must return float \[3, 64\]"),
    ],
)
def test_train_rejects_an_invalid_function_in_one_line_before_it_writes_files(
    flag, name, reason, module, capsys
):
    words = ["train", "text.py", "--preset", "tiny", f"--own-{flag}", name, "--out", "run"]
    said = refused(words, capsys)
    assert flag in said and name.split(":")[0] in said
    assert re.search(reason, said), said
    assert not Path("run").exists()


def save_own_model(folder, **options):
    """Saves a model with the functions and returns its logits; no longer imports the module."""
    config = jf.DecoderConfig(
        vocab_size=257, max_length=16, num_layers=1, embed_dim=8, num_heads=2, **options
    )
    model = jf.Decoder(config, **functions())
    tokens = np.arange(12)[None]
    variables = model.init(jax.random.key(0), tokens)
    jf.save(folder, model, variables, ByteTokenizer.train(["abc"], 257))
    del sys.modules["named_parts"]
    Path("imported").unlink()
    return model.apply(variables, tokens)


def test_no_command_opens_an_untrusted_folder_or_imports_its_modules(module, capsys):
    save_own_model("saved")
    for words in (
        "generate saved a",
        "chat saved",
        "translate saved text.py",
        "fill-mask saved [MASK]",
        "evaluate saved text.py",
        "explain saved a",
        "export saved out",
        "verify saved",
        "plot-attention saved a",
        "train text.py --init-from saved --steps 1",
        "sweep text.py --vary seed=0,1 --init-from saved --steps 1",
    ):
        said = refused(words.split(), capsys)
        assert "named_parts:" in said, said
        assert ("only jaxformer's own format" if "export" in words else "--trust-code") in said
    with pytest.raises(ValueError, match="trust_code=True"):
        jf.load("saved")
    assert not Path("imported").exists() and "named_parts" not in sys.modules


@pytest.mark.parametrize("content", [{}, {"class": "FunctionMask", "allows": None}])
def test_config_section_that_names_no_user_defined_function_is_rejected_with_its_path(content):
    with pytest.raises(ValueError, match=r"config\.json: mask is .*, which flags cannot describe"):
        read_own_names({"mask": content}, Path("config.json"))


def test_trusted_folder_is_loaded_with_its_functions(module):
    expected = save_own_model("saved")
    loaded = jf.load("saved", trust_code=True)
    np.testing.assert_allclose(
        loaded.model.apply(loaded.variables, np.arange(12)[None]), expected, rtol=1e-6, atol=1e-6
    )
    assert Path("imported").exists()
    passed = jf.load("saved", layers=functions().values())
    assert passed.model == loaded.model


def test_load_uses_functions_passed_by_the_caller_instead_of_importing_functions(module):
    """A folder that names another module gets the function of the caller."""
    save_own_model("saved")
    content = Path("saved/config.json").read_text()
    Path("saved/config.json").write_text(content.replace("named_parts:", "broken_parts:"))
    given = functions()
    loaded = jf.load("saved", layers=given.values(), trust_code=True)
    assert loaded.model.activation is given["activation"]
    with pytest.raises(ValueError, match="importing the module broken_parts failed"):
        jf.load("saved", trust_code=True)


def test_name_in_a_trusted_folder_must_refer_to_a_valid_class_or_function(module):
    save_own_model("saved")
    content = json.loads(Path("saved/config.json").read_text())
    for section, reason in (
        ({"class": "named_parts:near"}, "must be a class"),
        ({"class": "pathlib:Path"}, "must be a dataclass"),
        ({"function": "named_parts:total"}, "must return float"),
        ({"function": "named_parts:squared_relu.__name__"}, "must be a function"),
    ):
        content["activation"] = section
        Path("saved/config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=reason):
            jf.load("saved", trust_code=True)


@pytest.mark.parametrize("preset", ["stdlib", "shakespeare"])
def test_run_config_with_user_defined_functions_has_the_parameter_count_of_its_model(
    preset, module
):
    """The presets have gated activations, rotary positions and tables of learned positions."""
    words = ["text.py", "--preset", preset, *FLAGS, "--num-layers", "1"]
    config = read_new_run(words, read_selection(words)).arguments.training.model
    assert parameter_count(config) == size_of(jf.Decoder(config, **functions()))


def size_of(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), int))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.slow
def test_run_with_user_defined_functions_is_trained_resumed_and_loaded(module, capsys):
    """Training, resuming and loading use the functions of the command line."""
    words = ["train", "text.py", *SETTINGS, *FLAGS, "--out", "run"]
    assert main([*words[:-2], "--steps", "5", "--out", "run"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("--trust-code")
    config = json.loads(Path("run/config.json").read_text())
    stored = {part: {"function": f"named_parts:{name}"} for part, name in NAMES.items()}
    assert {part: config[part] for part in NAMES} == stored

    sys.modules.pop("named_parts")
    Path("imported").unlink()
    resume = ["train", "--resume", "--out", "run", "--steps", "12"]
    assert "--trust-code" in refused(resume, capsys)
    assert "no effect" in refused([*words[:-2], "--trust-code"], capsys)
    assert not Path("imported").exists()
    assert main([*resume, "--trust-code"]) == 0

    loaded = jf.load("run", trust_code=True)
    model = jf.Decoder(loaded.model.config, **functions())
    tokens = np.arange(20)[None]
    logits = loaded.model.apply(loaded.variables, tokens)
    np.testing.assert_array_equal(logits, model.apply(loaded.variables, tokens))
    capsys.readouterr()
    assert main(["generate", "run", "def", "--trust-code", "--max-new-tokens", "3"]) == 0
    assert main(["evaluate", "run", "text.py", "--trust-code", "--json"]) == 0
    assert "own format" in refused(["export", "run", "out"], capsys)

    tune = ["train", "text.py", *SETTINGS[-12:], "--init-from", "run", "--lora-rank", "1"]
    tune = [*tune, "--steps", "1", "--out", "tuned"]
    assert "--trust-code" in refused(tune, capsys)
    other = ["--trust-code", "--own-activation", "named_parts:total"]
    assert "own-activation" in refused([*tune, *other], capsys)
    assert main([*tune, "--trust-code"]) == 0
    tuned = jf.load("tuned", trust_code=True)
    assert tuned.model.activation is loaded.model.activation
    assert "own format" in refused(["export", "tuned", "out", "--adapter"], capsys)


@pytest.mark.slow
def test_saved_model_with_user_defined_functions_can_be_fine_tuned(module):
    """The config of the saved model has a gated activation, which the user's function replaces."""
    save_own_model("saved", activation="swiglu", positions="learned")
    words = ["--init-from", "saved", "--trust-code", "--steps", "1", "--out", "tuned"]
    assert main(["train", "text.py", *words]) == 0
    tuned = jf.load("tuned", trust_code=True)
    assert tuned.model.mask.allows is functions()["mask"]
    assert parameter_count(tuned.model.config) == size_of(tuned.model)


@pytest.mark.slow
def test_sweep_and_compare_show_the_names_of_user_defined_functions(module, capsys):
    vary = ["--vary", "own-activation=None,named_parts:squared_relu", "--vary", "seed=0,1"]
    words = [*SETTINGS, "--num-layers", "1", "--activation", "relu"]
    assert "no effect" in refused(["sweep", "text.py", *vary, *words, "--out", "S"], capsys)
    assert main(["sweep", "text.py", *vary, *words[:-2], "--out", "S", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    losses = [x["held_out_loss"] for x in settings]
    assert len(losses) == 2 and losses[0] != losses[1]
    runs = sorted(str(x.parent) for x in Path("S").glob("*/config.json"))
    sys.modules.pop("named_parts")
    Path("imported").unlink()
    assert main(["compare", *runs, "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)["settings"]
    assert set(changed["own_activation"]) == {None, "named_parts:squared_relu"}
    assert not Path("imported").exists()
