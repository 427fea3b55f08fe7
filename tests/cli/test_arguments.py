"""The parser of the command line, with drawn words for every flag of every verb."""

import io
import re
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import VERBS, main
from jaxformer.cli.arguments import complete, parse, read_given
from jaxformer.cli.compare import CompareArguments
from jaxformer.cli.flags import list_flags
from jaxformer.cli.generate import GenerateArguments
from jaxformer.cli.train_arguments import TrainArguments, check_unchanged
from jaxformer.models.config import KINDS, RotaryScaling
from jaxformer.models.config.check import shown
from jaxformer.training.config import MeshSizes
from jaxformer.training.presets import training_preset
from tests.cli.test_every_option import arguments_of

PARSERS = [*(verb for verb in VERBS if verb != "train"), *(f"train --model {x}" for x in KINDS)]
FIELDS = {
    "model": "kind",
    "attention_implementation": "attention",
    "scan_layers": "layers",
}  # {flag: field}, where their names differ

NUMBERS = st.sampled_from([1, 2, 8, 64, 300]) | st.integers(-3, 2**40)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda x: x != "None")
# For each type of value: the values, and how they are written as a word.
SIMPLE = {
    int: (NUMBERS, str),
    float: (NUMBERS.map(float) | st.floats(allow_nan=False), repr),
    str: (TEXTS, str),
    Path: (TEXTS.map(Path).filter(lambda path: str(path) != "None"), str),
    bool: (st.booleans(), str),
    NoneType: (st.none(), str),
    MeshSizes: (
        st.builds(MeshSizes, *[st.integers(1, 4)] * 4),
        lambda x: f"tensor={x.tensor},data={x.data},fsdp={x.fsdp},expert={x.expert}",
    ),
    RotaryScaling: (
        st.builds(RotaryScaling, st.just("yarn"), st.floats(0.5, 8), st.integers(1, 99)),
        lambda x: f"yarn,original_length={x.original_length},factor={x.factor!r}",
    ),
}


def id_of(parser):
    """Returns the name of the verb or, for `train`, of the kind of model."""
    return parser.split()[-1]


def defaults_of(parser):
    """Returns the dataclass of a verb, and its instance whose values are the defaults, or None."""
    verb, *kind = parser.split(" --model ")
    if not kind:
        return arguments_of(verb), None
    return TrainArguments, TrainArguments(training_preset("tiny", *kind), kind=kind[0])


def members_of(hint):
    is_union = get_origin(hint) not in (Literal, tuple, None)
    return get_args(hint) if is_union else (hint,)


def entries_of(hint):
    return members_of(get_args(hint)[0]) if get_origin(hint) is tuple else (hint,)


def drawn_from(hint, least):
    """Draws (value, words) for a type that is no union; a tuple has `least` or more entries."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint)).map(lambda value: (value, [value]))
    if get_origin(hint) is tuple:
        entries = st.one_of([drawn_from(x, 1) for x in entries_of(hint)])
        drawn = st.lists(entries, min_size=least, max_size=3)
        return drawn.map(lambda pairs: (tuple(x for x, _ in pairs), [y for _, [y] in pairs]))
    values, written = SIMPLE[hint]
    return values.map(lambda value: (value, [written(value)]))


@st.composite
def given_flags(draw, flag):
    """Draws (value, words) for one flag or positional argument, whose words are without its name.

    One entry of a pattern, as in --window 8, is a number, and not a tuple.
    """
    members = members_of(flag.hint)
    value, words = draw(st.one_of([drawn_from(x, min(2, len(members))) for x in members]))
    if flag.is_positional:
        return value, words
    if flag.hint is bool:
        value = value or len(flag.names) == 1
        return value, [flag.names[not value]]
    name = draw(st.sampled_from(flag.names))
    if name.startswith("--"):
        name = "--" + name[2:].replace("-", draw(st.sampled_from("-_")))
    if flag.spelling.is_repeated:
        return value, [f"{name}={word}" for word in words]
    if words[0].startswith("-") or draw(st.booleans()):
        return value, [f"{name}={words[0]}", *words[1:]]
    return value, [name, *words]


@st.composite
def command_lines(draw, parser):
    """Draws (values by key, words) for up to four flags and the required arguments."""
    flags = list_flags(*defaults_of(parser))
    some = draw(st.lists(st.sampled_from(flags), unique_by=lambda flag: flag.key, max_size=4))
    options = [flag for flag in flags if not flag.is_positional]
    positional = [flag for flag in flags if flag.is_positional]
    values, words = {}, []
    for chosen, end in ((options, ["--"]), (positional, [])):
        for flag in chosen:
            if flag in some or flag.is_required:
                values[flag.key], of_flag = draw(given_flags(flag))
                words += of_flag
        words += end
    return values, words


def replaced(instance, values):
    """Returns the dataclass with these values, also in the dataclasses in its fields."""
    parts = {field.name: getattr(instance, field.name) for field in fields(instance)}
    for name, part in parts.items():
        if is_dataclass(part) and not isinstance(part, MeshSizes | RotaryScaling):
            parts[name] = replaced(part, values)
        else:
            parts[name] = values.get(name, part)
    return replace(instance, **parts)


def outcome(compute):
    """Returns what a function returns, or the message of its ValueError."""
    try:
        return compute()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("parser", PARSERS, ids=id_of)
@given(data=st.data())
def test_given_command_line_flags_replace_the_defaults(parser, data):
    """A value that a dataclass refuses gives the same message as in Python."""
    kind, default = defaults_of(parser)
    values, words = data.draw(command_lines(parser))
    assert read_given(kind, parser, words, default) == values
    found = outcome(lambda: complete(kind, values, default))
    named = {FIELDS.get(name, name) if default else name: x for name, x in values.items()}
    needed = {flag.key for flag in list_flags(kind) if flag.is_required}
    instance = outcome(lambda: default or kind(**{name: values[name] for name in needed}))
    if not isinstance(instance, str):
        instance = outcome(lambda: replaced(instance, named))
    unread = isinstance(found, str) and ("has no effect here" in found or "preset is" in found)
    assert found == instance or (unread and not isinstance(instance, str))


def refusal_of(words):
    """Returns the line that a refused command prints."""
    said = io.StringIO()
    with redirect_stderr(said):
        assert main(words) == 2
    assert said.getvalue().count("\n") == 1
    return said.getvalue().removeprefix("jaxformer: ").removesuffix("\n")


def required_words(parser):
    """Returns a command line with the required arguments."""
    required = [flag for flag in list_flags(*defaults_of(parser)) if flag.is_required]
    words = [[x.name] if x.is_positional else [x.name, "[MASK]"] for x in required]
    return [*parser.split(), *chain(*words)]


def checked_flags(parser):
    """Returns the flags of a verb that refuse some words: not those of texts and paths."""
    return [
        flag
        for flag in list_flags(*defaults_of(parser))
        if not (flag.is_positional or flag.spelling.is_repeated or flag.hint is bool)
        and not {str, Path} & {*members_of(flag.hint)}
    ]


@pytest.mark.parametrize("parser", filter(checked_flags, PARSERS), ids=id_of)
@given(data=st.data())
def test_an_invalid_value_error_names_the_flag_and_accepted_values(parser, data):
    flag = data.draw(st.sampled_from(checked_flags(parser)))
    word = "x" + data.draw(st.text(max_size=9))  # no word of these types begins with x
    given_word = data.draw(st.sampled_from([[flag.name, word], [f"{flag.name}={word}"]]))
    said = refusal_of([*required_words(parser), *given_word])
    assert said.startswith(f"{flag.name} is {shown(word)}; ")
    accepted = {int: ["a whole number"], float: ["a number"], NoneType: ["None"], bool: ["True"]}
    members = {x for member in members_of(flag.hint) for x in entries_of(member)}
    if not {MeshSizes, RotaryScaling} & members:  # these have their own errors
        for member in members:
            assert all(word in said for word in accepted.get(member, get_args(member)))


@pytest.mark.parametrize("parser", PARSERS, ids=id_of)
def test_flag_without_value_and_switch_with_value_are_refused(parser):
    for flag in list_flags(*defaults_of(parser)):
        for name in () if flag.is_positional or flag.takes_several else flag.names:
            if flag.hint is bool:
                said = refusal_of([*required_words(parser), f"{name}=True"])
                assert said == f"{name} is 'True'; this flag does not accept a value"
            else:
                said = refusal_of([*required_words(parser), name])
                assert said == f"{name} has no value; give {name} {flag.placeholder}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate", "RUN is missing; give the model: a run folder, a folder that jf.save wrote"),
        ("export run", "OUT is missing; give"),
        ("compare", "RUN is missing; give"),
        ("fill-mask run", "TEXT is missing; give text with at least one [MASK]"),
        (
            "generate run a text more",
            "unexpected word 'text'; usage: jaxformer generate RUN [TEXT] [OPTIONS]",
        ),
        ("bench -5", "unexpected word '-5'; usage: jaxformer bench [OPTIONS]"),
        ("generate run --prompt -x", "a value that starts with - is written --prompt=-x"),
        ("generate run --colour=red --n 5", "unknown option --colour, --n; jaxformer generate"),
        ("train --window 8 None my.txt", "--window is 'my.txt'; it must be a whole number or None"),
        ("train --temperature -1e5", "unknown option --temperature"),
        ("train --learning-rate -1e-3", "learning_rate is -0.001; it must be above 0"),
        ("train --learning-rate -inf", "learning_rate is -inf; it must be above 0"),
        ("train --cell rnn", "--cell has no effect here; it needs --model recurrent"),
        (
            "train --model recurrent --window_length 3 --no_rotary_interleaved",
            "--no_rotary_interleaved has no effect here; it needs --model decoder or encoder",
        ),
        ("train --rotary-scaling yarn", "--rotary-scaling is 'yarn'; factor is missing"),
        ("train --rotary-scaling linear,factor=x", "factor is 'x'; it must be a number"),
        ("train --rotary-scaling linear,factor=2,beta_fast=3", "linear does not use beta_fast"),
        ("train --rotary-scaling yarn,factor=2,factor=3", "no name may occur twice"),
        ("train --mesh data=2,model=3", "--mesh is 'data=2,model=3'; the axes are data, fsdp"),
    ],
)
def test_command_line_errors_name_the_accepted_arguments(words, said):
    assert said in refusal_of(words.split())


def test_positional_arguments_may_follow_flags():
    found = parse(CompareArguments, "compare", "a --json -oall.png b --out=x.png -- --c".split())
    assert found == CompareArguments((Path("a"), Path("b"), Path("--c")), Path("x.png"), True)


def test_a_repeated_flag_collects_its_values():
    words = "run --ignore-generation-config a --seed 3 --ignore-generation-config=b --seed 4"
    found = parse(GenerateArguments, "generate", words.split())
    assert found == GenerateArguments("run", ignore_generation_config=("a", "b"), seed=4)


@pytest.mark.parametrize("prompt", ["-5", "-1e5", "- a", "-x y", "--x y", "-", "a=b", ""])
def test_prompt_may_be_a_negative_number_or_start_with_a_dash(prompt):
    assert parse(GenerateArguments, "generate", ["run", "--prompt", prompt]).prompt == prompt


@pytest.mark.parametrize("prompt", ["def f", "-5", "- a", "a=b", ""])
def test_prompt_may_be_a_positional_argument_or_a_flag(prompt):
    """A word is the text in any order with the flags, and only one of the two forms is accepted."""
    flag = ["run", "--prompt", prompt, "--seed", "3"]
    for words in (flag, flag[1:] + flag[:1], ["run", prompt, "--seed", "3"]):
        assert parse(GenerateArguments, "generate", words).prompt == prompt
    assert "unexpected word 'b'" in refusal_of(["generate", "run", "b", "--prompt", "a"])


def test_help_flag_overrides_invalid_arguments(capsys):
    for words in ("--causal --help", "--steps --help", "--steps x -h"):
        with pytest.raises(SystemExit):
            main(["train", *words.split()])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_a_resumed_run_lists_only_flags_of_its_command(kind, tmp_path):
    default = TrainArguments(training_preset("tiny", kind), kind=kind)
    changed = replace(default, training=replace(default.training, seed=7))
    with pytest.raises(ValueError, match="--seed is 7") as error:
        check_unchanged(RunFolder(tmp_path), default.training, changed)
    listed = {*re.findall("--[a-z-]+", str(error.value).partition("only")[2])}
    assert listed <= {flag.name for flag in list_flags(TrainArguments, default)}
    assert {"--attention-implementation", "--scan-layers"} <= listed
