"""Control characters from files are shown as escapes, so that a terminal does not execute them."""

import ast
import io
import json
import re
import sys
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import jaxformer
from jaxformer.cli import _show_traceback, main
from jaxformer.terminal import kind_of, say, visible, write
from jaxformer.training.screen import Screen
from tests.slow import mostly_slow

EVIL = "\x1b]0;PWNED\x07\x9b2J\x7f\r\u202e\u2066[red]"
SHOWN = r"\x1b]0;PWNED\x07\x9b2J\x7f\x0d\u202e\u2066[red]"
PACKAGE = Path(jaxformer.__file__).parent


def obeyed(text: str) -> set:
    """Returns the control characters and those that reverse the order of a line."""
    turning = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
    control = {x for x in text if unicodedata.category(x) == "Cc"} - {"\n", "\t"}
    return control | turning.intersection(text)


@given(text=st.text(st.characters(categories=["Cc", "Cf", "L"])))
@example(text=EVIL)
def test_terminal_text_escapes_control_characters_only(text):
    """No other character changes."""
    found = visible(text)
    assert not obeyed(found)
    for character in obeyed(text):
        code = ord(character)
        text = text.replace(character, f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
    assert found == text


def llama(folder, **options):
    """Makes a folder in Hugging Face format that loading must refuse."""
    folder.mkdir(exist_ok=True)
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    options = {"model_type": "llama", **sizes, "num_attention_heads": 2, **options}
    (folder / "config.json").write_text(json.dumps(options))
    save_file({f"A{EVIL}": np.zeros(1, np.float32)}, folder / "model-1.safetensors")
    index = {"weight_map": {"B": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {EVIL: 1},
        {"model_type": EVIL},
        {"hidden_act": EVIL},
        {"rope_scaling": {"rope_type": EVIL, "factor": 2.0}},
        {},  # the index lacks the tensor with that name
        {"format": EVIL},
    ],
    ids=lambda options: next(iter(options), "tensor")[:12],
)
@pytest.mark.parametrize("verb", mostly_slow(["generate", "import"], "import"))
def test_terminal_output_escapes_text_from_run_files(verb, options, tmp_path, capsys):
    """It is tested for keys, values and tensor names."""
    words = [verb, str(llama(tmp_path / "model", **options)), *["out"] * (verb == "import")]
    assert main(words) == 2
    said = "".join(capsys.readouterr())
    assert not obeyed(said) and said.count("\n") == 1 and "PWNED" in said


@pytest.mark.parametrize(
    "words",
    [
        [EVIL],
        ["generate", EVIL],
        ["train", "--preset", EVIL],
        pytest.param(["train", f"--{EVIL}"], marks=pytest.mark.slow),
        ["train", "--resume", "--out", EVIL],
        ["train", EVIL],
        ["evaluate", EVIL, EVIL],
        ["compare", EVIL],
        ["export", EVIL, EVIL],
        ["doctor", "--preset", "tiny", "--target", EVIL],
    ],
)
def test_error_messages_escape_control_characters_in_arguments(words, capsys):
    assert main(words) == 2
    assert not obeyed("".join(capsys.readouterr()))


def test_control_characters_in_warnings_tracebacks_and_samples_are_escaped(capsys, monkeypatch):
    def warn(argv):
        warnings.simplefilter("default")  # pytest turns warnings into errors
        warnings.warn(EVIL, stacklevel=1)

    monkeypatch.setattr("jaxformer.cli.compare.main", warn)
    assert main(["compare", "run"]) == 0
    try:
        raise ValueError(EVIL)
    except ValueError:
        _show_traceback(*sys.exc_info())
    Screen().say(EVIL)
    say(EVIL)
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\n{SHOWN}\n" and not obeyed(err)
    assert f"warning: {SHOWN}" in err and f"ValueError: {SHOWN}" in err and "Traceback" in err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_is_escaped_only_on_a_terminal(is_terminal, monkeypatch):
    """A pipe gets the original characters."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    write(EVIL + "\n\t")
    assert stream.getvalue() == (SHOWN if is_terminal else EVIL) + "\n\t"


def test_only_the_terminal_module_prints():
    """Only `terminal.py` and the screen write to the standard streams."""
    calls = {"print": set(), "sys.stdout.write": set(), "sys.stderr.write": set()}
    calls |= {"Console": set()}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text if any(f"{name}(" in text for name in calls) else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in calls:
                calls[name].add(str(path.relative_to(PACKAGE)))
    assert calls == {
        "print": {"terminal.py"},
        "sys.stdout.write": {"terminal.py"},
        "sys.stderr.write": set(),
        "Console": {"training/screen.py"},  # rich's, which prints too
    }


def test_class_names_in_messages_have_the_right_article():
    assert [kind_of(x) for x in (3, "x", [], object())] == [
        "an int",
        "a str",
        "a list",
        "an object",
    ]
    for path in PACKAGE.rglob("*.py"):
        found = re.search(r"\ban? \{(type\(|\w+\.__name__)", path.read_text())
        assert not found, f"{path} writes {found[0]!r}; use terminal.kind_of or with_article"
