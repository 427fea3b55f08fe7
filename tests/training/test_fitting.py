"""Presets change to suit the user's values, so that no single flag contradicts a preset."""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jaxformer.cli import main, train
from jaxformer.cli.arguments import read_given
from jaxformer.cli.flags import field_values
from jaxformer.models.config import KINDS, PRESETS, RecurrentConfig, kind_of
from jaxformer.training.config import TextTraining
from jaxformer.training.fitting import fit_preset
from jaxformer.training.presets import RUNS, TRAININGS, training_preset
from jaxformer.training.tasks.text import _check_new_model

EVERY = {
    **{f"{name} {kind}": run for name, kinds in RUNS.items() for kind, run in kinds.items()},
    **{name: TRAININGS[kind_of(model)](model=model) for name, model in PRESETS.items()},
}
LEAST = {"vocab_size": 260, "source_vocab_size": 260, "relative_buckets": 4, "keep": 2}
LEAST |= {"relative_distance": 3, "max_length": 2, "window_length": 2}
MOST = {"lengths": 8, "experts_per_token": 64}
REFUSED = {"prefix", "lora_rank", "causal"}  # not accepted in training, without --from, or as False


SIZES = (1, 2, 3, 5, 64, 100, 129, 1000)


def settings_of(run):
    """Yields (field, value) for the whole numbers, switches and choices of a run."""
    for config in (run, run.model):
        hints = get_type_hints(type(config))
        for field in fields(config):
            name, hint = field.name, hints[field.name]
            if name in REFUSED:
                continue
            if hint in (int, int | None):
                least, most = LEAST.get(name, 1), MOST.get(name, max(SIZES))
                yield from ((name, size) for size in SIZES if least <= size <= most)
            elif hint is bool:
                yield from ((name, value) for value in (True, False))
            elif get_origin(hint) is Literal:
                yield from ((name, value) for value in get_args(hint))


def values_in(words, run):
    """Returns the values of the flags of a run."""
    return read_given(type(run), "train", words.split(), run)


def accepted(run, changes):
    """Returns the fitted preset after the checks of complete configs."""
    fitted = fit_preset(run, changes)
    resolved = fitted.model.resolved
    if hasattr(resolved, "num_encoder_layers"):
        assert resolved.encoder.num_layers == resolved.num_encoder_layers
    if isinstance(fitted, TextTraining):
        _check_new_model(fitted)
    return fitted


@pytest.mark.parametrize("name", EVERY)
def test_a_single_flag_is_accepted_and_keeps_its_value(name):
    """For every preset of every kind, except odd sizes that the positions do not accept."""
    run = EVERY[name]
    positions = getattr(run.model, "positions", "none")
    even = {"sinusoidal": "embed_dim", "rotary": "head_dim"}.get(positions)
    for field, value in settings_of(run):
        if field == even and value % 2:
            continue
        assert field_values(accepted(run, {field: value}))[field] == value


HEADS = st.fixed_dictionaries(
    {},
    optional={
        "embed_dim": st.integers(1, 300),
        "num_heads": st.integers(1, 12),
        "num_kv_heads": st.integers(1, 12),
        "num_encoder_heads": st.integers(1, 12),
    },
)


@pytest.mark.parametrize("name", ["stdlib decoder", "translation encoder-decoder", "llama-1.1b"])
@settings(phases=[Phase.explicit, Phase.generate])
@given(changes=HEADS)
@example(changes={"embed_dim": 100, "num_kv_heads": 3})
@example(changes={"embed_dim": 7})
@example(changes={"num_heads": 5, "num_encoder_heads": 3})
def test_heads_and_widths_are_refused_only_if_given_values_contradict(name, changes):
    """The error names only fields that the user set."""
    run = EVERY[name]
    if not hasattr(run.model, "num_encoder_heads"):
        changes = {field: x for field, x in changes.items() if field != "num_encoder_heads"}
    try:
        fitted = accepted(run, changes)
    except ValueError as error:
        named = [field for field in changes if field in str(error)]
        assert len(named) >= 2 or "head_dim" in str(error), error
    else:
        assert field_values(fitted).items() >= changes.items()


@pytest.mark.parametrize("name", EVERY)
def test_values_that_are_not_set_come_from_the_preset(name):
    assert fit_preset(EVERY[name], {}) == EVERY[name]
    assert fit_preset(EVERY[name], {"seed": 3}) == replace(EVERY[name], seed=3)


@dataclass(frozen=True)
class Headed(RecurrentConfig):
    """A kind of model with heads that need not divide anything."""

    num_heads: int = 4


def test_a_new_kind_of_model_may_have_num_heads_alone(monkeypatch):
    """The rules about heads are those of a Transformer, and do not ask for its other fields."""
    monkeypatch.setitem(KINDS, "headed", Headed)
    assert fit_preset(TextTraining(model=Headed()), {"num_heads": 3}).model.num_heads == 3


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ("", 6),
        ("--minutes 0.5", 2),
        ("--minutes 1", 3),
        ("--minutes 2.5", 4),
        ("--minutes 60", 6),
        ("--minutes 1 --lengths 6", 6),
        ("--minutes 9 --lengths 2", 2),
        ("--steps 100 --minutes None", 6),
    ],
)
def test_a_run_of_few_minutes_has_few_batch_lengths(words, lengths):
    """A program is compiled for each of them."""
    preset = training_preset("translation", "encoder-decoder")
    assert fit_preset(preset, values_in(words, preset)).lengths == lengths


@pytest.mark.parametrize("mesh, batch", [("data=3", 9), ("fsdp=4,data=2", 8), ("fsdp=5", 10)])
def test_batch_size_is_rounded_up_to_the_mesh(mesh, batch):
    run = training_preset("stdlib", "decoder")
    assert fit_preset(run, values_in(f"--mesh {mesh}", run)).batch_size == batch


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_every_spelling_reach_the_run(kind, monkeypatch):
    """Flags with dashes, underscores or equals signs, negated flags, and flags before a text."""
    taken = []
    monkeypatch.setattr(
        train, "_train", lambda folder, inputs, arguments, **_: taken.append(arguments)
    )
    words = "--max_length=64 --no-tie-embeddings --dropout .5 --minutes 2 --embed-dim 96 my.txt"
    assert main(["train", *words.split(), "--model", kind, "--optimizer", "lion"]) == 0
    training = taken[0].training
    model = training.model
    assert (model.max_length, model.tie_embeddings, model.dropout) == (64, False, 0.5)
    assert (training.minutes, training.steps, training.optimizer.optimizer) == (2.0, None, "lion")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--optimizer adafactor", 0.05),
        ("--optimizer lion", 1e-3),
        ("--optimizer muon", 3e-3),
        ("--optimizer adamw", 3e-3),
        ("--optimizer adafactor --learning-rate 0.2", 0.2),
    ],
)
def test_the_learning_rate_of_a_preset_follows_the_optimizer(words, expected):
    """The preset's is for AdamW. The ratio is that of the optimizers' default learning rates."""
    preset = training_preset("tiny", "decoder")
    optimizer = fit_preset(preset, values_in(words, preset)).optimizer
    if "--learning-rate" not in words:  # fields of the optimizer are set later
        assert (optimizer.optimizer, optimizer.peak) == (words.split()[1], expected)
    else:
        assert optimizer == preset.optimizer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset shakespeare --model decoder --dropout 1.5", "dropout is 1.5; it must"),
        ("--max-length 64 --window-length 80", "window_length is 80; it must be in 1 … max_length"),
        ("--batch-size 9 --mesh data=2", "batch_size is 9; it must be a multiple of data"),
        (
            "--model encoder-decoder --source-vocab-size 300 --vocab-size 400",
            "is 300; with share_e",
        ),
        (
            "--model encoder-decoder --source-vocab-size 300 --vocab-size 400 "
            "--no-share-embeddings",
            "source_vocab_size is 300; it must be vocab_size (400), since one tokenizer",
        ),
        ("--positions rotary --rotary-fraction 0.3", "of which rotary_fraction (0.3)"),
        ("--no-pooler --model encoder --num-labels 3", "num_labels is 3; it needs the pooler"),
        (
            "--preset transformer-base --positions sinusoidal --embed-dim 7",
            "embed_dim is 7; it must be even for sinusoidal",
        ),
        ("--steps 0", "steps is 0; it must be at least 1"),
        ("--preset stdlib --minutes None --steps None", "steps and minutes are None"),
    ],
)
def test_an_error_names_only_values_that_the_user_set(words, said, capsys):
    assert main(["train", *words.split()]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and "the preset's" not in complaint.replace("the preset's head", "")


def test_an_error_says_that_a_value_came_from_the_preset(monkeypatch, capsys):
    """This holds for an error from any place and at any time."""

    def refuses(*_, **__):
        raise ValueError("window_length is 4; batch_size (8) and max_length is 32: no")

    monkeypatch.setattr(train, "_train", refuses)
    assert main("train --preset tiny --max-length 32 --seed 4".split()) == 2
    assert capsys.readouterr().err == (
        "jaxformer: the preset's window_length is 4; the preset's batch_size (8) and "
        "max_length is 32: no\n"
    )
