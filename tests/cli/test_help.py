"""The help of every verb: complete, readable, and no wider than the terminal."""

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

import jaxformer
from jaxformer.cli import VERBS, main
from jaxformer.cli.flags import default_text, field_values, list_flags
from jaxformer.cli.generate import GenerateArguments
from jaxformer.cli.train_arguments import MAIN_FLAGS
from jaxformer.cli.verify import VerifyArguments
from jaxformer.models.config import KINDS
from jaxformer.training.presets import training_preset, usual_preset

COMMANDS = [[verb] for verb in VERBS] + [["train", "--model", kind] for kind in KINDS]


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    printed, said = capsys.readouterr()
    assert (stop.value.code, said) == (0, "")
    return printed


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_lines_fill_the_width_of_the_terminal(words, capsys, monkeypatch):
    """The words are the same at every width; a line breaks only if the next word does not fit."""
    shown = {}
    for width in (60, 80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        text = help_of(capsys, *words, "--help-all")
        shown[width] = "".join(text.split())
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        for line, below in pairwise(lines):
            indent = " " * 26
            if line.startswith(indent) and below.startswith(indent):
                first, *rest = below.split()
                words_that_go_together = f"{first} {rest[0]}" if first == "(default:" else first
                assert len(line) + 1 + len(words_that_go_together) > width, (line, below)
        titles = [number for number, line in enumerate(lines) if re.fullmatch(r"\S.*:", line)]
        assert all(lines[number + 1 : number + 2] for number in titles), "an empty section"
    assert len(set(shown.values())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_help_lists_every_field_once_with_a_readable_default(kind, capsys):
    """--help lists only the ten main flags, which come first, and mentions --help-all."""
    training = training_preset(usual_preset(kind), kind)
    text = help_of(capsys, "train", "--model", kind, "--help-all")
    listed = re.findall(r"(?m)^  (--[\w-]+)", text)
    assert len(listed) == len(set(listed))
    assert {name.replace("_", "-") for name in field_values(training)} <= {x[2:] for x in listed}
    for odd in ("(default: )", "{None}", "[{", "MISSING", "<class", "(default: ')"):
        assert odd not in text
    flat = " ".join(text.split())
    assert flat.count("(default: ") + flat.count("(required)") == len(listed)
    rate = training.optimizer.learning_rate
    assert f"--learning-rate FLOAT peak learning rate (default: {rate})" in flat
    short = help_of(capsys, "train", "--model", kind, "--help")
    first = [name for name in re.findall(r"(?m)^  (--[\w-]+)", short)]
    assert first[-10:] == list(MAIN_FLAGS) and listed[: len(first)] == first
    assert ("--source" in first) == ("encoder-decoder" in kind)
    assert f"--help-all lists all {len(listed)} options" in " ".join(short.split())


def test_help_shows_defaults_in_the_syntax_of_the_command_line():
    assert [default_text(x) for x in (0.0006, 1e-5, 10_000.0, (), "", True, None, (8, None))] == [
        *("0.0006", "1e-05", "10000", "none", "empty", "on", "None", "8 None")
    ]
    flags = {flag.name: flag for flag in list_flags(VerifyArguments)}
    assert flags["--json"].names == ("--json",) and flags["RUN"].is_required
    assert len(list_flags(GenerateArguments)) == len(fields(GenerateArguments))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate run --promt x", "--promt; did you mean --prompt?"),
        ("generate run --promt=x", "--promt; did you mean --prompt?"),
        ("generate run -prompt x", "-prompt; did you mean --prompt?"),
        ("train --learning_rat 3", "--learning_rat; did you mean --learning-rate?"),
        ("train --no-residul", "--no-residul; did you mean --no-residual?"),
        ("train --Steps 3 --embed-dims 8", "--Steps; did you mean --steps? --embed-dims; did"),
        ("evaluate run a.txt --jsn", "--jsn; did you mean --json?"),
        ("trian", "did you mean train?"),
        ("train --colour red", "unknown option --colour; jaxformer train --help-all lists"),
    ],
)
def test_error_suggests_correct_spelling_of_flag_or_command(words, said, capsys):
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_short_help_of_train_is_shown_without_other_arguments(capsys):
    assert "most used" in help_of(capsys, "train", "--resume", "-h")


def test_commands_that_training_suggests_exist():
    folder = Path(jaxformer.__file__).parent / "training" / "tasks"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    methods = re.findall(r"def example\(self\).*?(?=\n    def |\n\n\n|\Z)", sources, re.DOTALL)
    verbs = {verb for body in methods for verb in re.findall(r"\[\"([a-z-]+)\"", body)}
    assert len(verbs) >= 3 and verbs <= VERBS.keys()
