"""A preset adapts to the user's values, so that no single flag contradicts a preset."""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jaxformer.cli import main, train
from jaxformer.cli.arguments import read_given
from jaxformer.cli.flags import field_values
from jaxformer.models.config import KINDS, PRESETS, RecurrentConfig, architecture_name
from jaxformer.training.config import TextTraining
from jaxformer.training.fitting import fit_preset
from jaxformer.training.presets import RUNS, TRAININGS, training_preset
from jaxformer.training.tasks.text import _check_new_model
from tests.slow import mostly_slow

EVERY = {
    **{f"{name} {kind}": run for name, kinds in RUNS.items() for kind, run in kinds.items()},
    **{name: TRAININGS[architecture_name(model)](model=model) for name, model in PRESETS.items()},
}
LEAST = {"vocab_size": 260, "source_vocab_size": 260, "relative_buckets": 4, "max_to_keep": 2}
LEAST |= {"relative_distance": 3, "max_length": 2, "window_length": 2}
MOST = {"lengths": 8, "experts_per_token": 64}
REFUSED = {"prefix", "lora_rank"}  # rejected in training, or rejected without --init-from


SIZES = (1, 2, 3, 5, 64, 100, 129, 1000)


def settings_of(run):
    """Yields (field, value) for the integers, switches and choices of a run."""
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
    """Returns the values that the flags of a run set."""
    return read_given(type(run), "train", words.split(), run)


def accepted(run, changes):
    """Returns the adapted preset, after the checks of complete configs."""
    fitted = fit_preset(run, changes)
    resolved = fitted.model.resolved
    if hasattr(resolved, "num_encoder_layers"):
        assert resolved.encoder.num_layers == resolved.num_encoder_layers
    if isinstance(fitted, TextTraining):
        _check_new_model(fitted)
    return fitted


@pytest.mark.parametrize(
    "name",
    mostly_slow(EVERY, "stdlib decoder", "translation encoder-decoder", "gpt2-124m", slow=EVERY),
)
def test_every_preset_accepts_a_change_of_any_single_field(name):
    """All presets of all kinds of models, except odd sizes that the positions do not allow."""
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
def test_preset_accepts_changes_of_heads_and_width_unless_they_conflict(name, changes):
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
def test_unspecified_training_settings_keep_the_values_of_the_preset(name):
    assert fit_preset(EVERY[name], {}) == EVERY[name]
    assert fit_preset(EVERY[name], {"seed": 3}) == replace(EVERY[name], seed=3)


@dataclass(frozen=True)
class Headed(RecurrentConfig):
    """A model config whose num_heads does not have to divide any size."""

    num_heads: int = 4


def test_fit_preset_accepts_a_config_with_num_heads_but_no_other_transformer_field(monkeypatch):
    """The rules about heads apply to Transformers only, and do not need other fields."""
    monkeypatch.setitem(KINDS, "headed", Headed)
    assert fit_preset(TextTraining(model=Headed()), {"num_heads": 3}).model.num_heads == 3


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ("", 6),
        ("--max-minutes 0.5", 2),
        ("--max-minutes 1", 3),
        ("--max-minutes 2.5", 4),
        ("--max-minutes 60", 6),
        ("--max-minutes 1 --lengths 6", 6),
        ("--max-minutes 9 --lengths 2", 2),
        ("--steps 100 --max-minutes None", 6),
    ],
)
def test_short_translation_runs_use_few_sequence_lengths(words, lengths):
    """Each batch length needs a compilation."""
    preset = training_preset("translation", "encoder-decoder")
    assert fit_preset(preset, values_in(words, preset)).lengths == lengths


@pytest.mark.parametrize("mesh, batch", [("data=3", 9), ("fsdp=4,data=2", 8), ("fsdp=5", 10)])
def test_preset_batch_size_is_rounded_up_to_a_multiple_of_the_mesh(mesh, batch):
    run = training_preset("stdlib", "decoder")
    assert fit_preset(run, values_in(f"--mesh {mesh}", run)).batch_size == batch


@pytest.mark.parametrize("kind", KINDS)
def test_train_accepts_all_spellings_of_flags(kind, monkeypatch):
    """Flags with dashes, underscores or equals signs, negated flags, and flags before a text."""
    taken = []
    monkeypatch.setattr(
        train, "train_run", lambda folder, inputs, arguments, **_: taken.append(arguments)
    )
    words = "--max_length=64 --no-tie-embeddings --dropout .5 --max-minutes 2 --embed-dim 96 my.txt"
    assert main(["train", *words.split(), "--model", kind, "--optimizer", "lion"]) == 0
    training = taken[0].training
    model = training.model
    assert (model.max_length, model.tie_embeddings, model.dropout) == (64, False, 0.5)
    assert (training.max_minutes, training.steps, training.optimizer.optimizer) == (
        2.0,
        None,
        "lion",
    )


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
def test_the_learning_rate_of_a_preset_depends_on_the_optimizer(words, expected):
    """The preset's rate is for AdamW and is scaled by the ratio of the default learning rates."""
    preset = training_preset("tiny", "decoder")
    optimizer = fit_preset(preset, values_in(words, preset)).optimizer
    if "--learning-rate" not in words:  # the optimizer's flags are applied later
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
        ("--positions rotary --rotary-fraction 0.3", "and rotary_fraction (0.3) rotates"),
        ("--no-pooler --model encoder --num-labels 3", "num_labels is 3, but pooler is False"),
        (
            "--preset transformer-base --positions sinusoidal --embed-dim 7",
            "embed_dim is 7; it must be even for sinusoidal",
        ),
        ("--steps 0", "steps is 0; it must be at least 1"),
        ("--preset stdlib --max-minutes None --steps None", "steps and max_minutes are both None"),
    ],
)
def test_training_config_error_names_only_values_that_the_user_set(words, said, capsys):
    assert main(["train", *words.split()]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and "the preset's" not in complaint.replace("the preset's head", "")


def test_training_config_error_says_which_value_came_from_the_preset(monkeypatch, capsys):
    """The explanation appears wherever and whenever the error is raised."""

    def refuses(*_, **__):
        raise ValueError("window_length is 4; batch_size (8) and max_length is 32: no")

    monkeypatch.setattr(train, "train_run", refuses)
    assert main("train --preset tiny --max-length 32 --seed 4".split()) == 2
    assert capsys.readouterr().err == (
        "jaxformer: the preset's window_length is 4; the preset's batch_size (8) and "
        "max_length is 32: no\n"
    )
