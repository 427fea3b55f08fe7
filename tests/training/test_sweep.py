"""Settings of a sweep, and the results that a sweep prints and draws."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import DecoderConfig
from jaxformer.models.config.lora import LoraConfig
from jaxformer.training import sweep_results
from jaxformer.training.config import Inputs, MeshSizes, OptimizerConfig, TextTraining
from jaxformer.training.group import shared_settings
from jaxformer.training.log import MOST_SKIPPED, has_diverged
from jaxformer.training.presets import training_preset
from jaxformer.training.run_folders import write_run
from jaxformer.training.sweep import Planned, folder_name, grid, groups
from jaxformer.training.sweep_results import averages, draw_sweep, table

NAMES = st.sampled_from(["seed", "norm", "learning-rate", "num-layers"])
VALUES = st.lists(st.sampled_from(["1", "2", "0.5", "rms"]), min_size=1, max_size=3, unique=True)
LISTED = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True)


@given(st.dictionaries(NAMES, VALUES), LISTED)
def test_sweep_grid_contains_each_combination_of_settings_once(varied, listed):
    settings = grid(varied, [{"embed-dim": value} for value in listed])
    sizes = [*map(len, varied.values()), max(1, len(listed))]
    assert len(settings) == math.prod(sizes)
    assert len({tuple(sorted(setting.items())) for setting in settings}) == len(settings)
    for setting in settings:
        assert all(setting[name] in values for name, values in varied.items())
        assert setting.keys() - varied.keys() == ({"embed-dim"} if listed else set())
    assert len(set(map(folder_name, settings))) == len(settings)


@pytest.mark.parametrize(
    ("varied", "listed", "said"),
    [
        ({"seed": ["1", "1"]}, [], "--seed 1 is given twice"),
        ({"seed": ["1"]}, [{"seed": "2"}], "--seed is in --list and in --vary"),
        ({}, [{"norm": "rms"}, {"norm": "rms"}], "--norm rms is given twice"),
    ],
)
def test_sweep_rejects_repeated_settings(varied, listed, said):
    with pytest.raises(ValueError, match=said):
        grid(varied, listed)


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=9), st.none() | st.integers(1, 4))
def test_sweep_groups_contain_runs_with_equal_keys_and_never_exceed_the_given_size(keys, most):
    numbered = [Planned({}, RunFolder(str(n)), Inputs(), None) for n in range(len(keys))]

    def key(run):
        return keys[int(run.folder.path.name)]

    found = groups(numbered, key, most)
    assert sorted(id(run) for group in found for run in group) == sorted(map(id, numbered))
    for group in found:
        assert len({key(run) for run in group}) == 1
        assert len(group) <= (most or len(keys)) and (len(group) == 1 or key(group[0]) is not None)
    if most is None:
        assert len(found) == len(set(keys) - {None}) + keys.count(None)


MODEL = DecoderConfig(vocab_size=300, num_layers=1, embed_dim=16, num_heads=2)


@pytest.mark.parametrize(
    ("options", "are_equal"),
    [
        ({"seed": 3}, True),
        (
            {"optimizer": OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=3)},
            True,
        ),
        ({"optimizer": OptimizerConfig(weight_decay=0.3)}, False),
        ({"batch_size": 4}, False),
        ({"steps": 7}, False),
        ({"model": replace(MODEL, norm="rms")}, False),
        ({"max_minutes": 1.0}, False),
        ({"mesh": MeshSizes()}, False),
        ({"lora": LoraConfig(lora_rank=2)}, False),
    ],
)
def test_runs_share_a_program_only_if_they_differ_in_nothing_but_seed_and_learning_rate(
    options, are_equal
):
    usual = TextTraining(MODEL)
    assert (shared_settings(replace(usual, **options)) == shared_settings(usual)) == are_equal


@pytest.fixture
def run(tmp_path):
    """Makes a run of a sweep from its training losses and its last held-out loss."""

    def make(setting, losses, held_out=None):
        config = TextTraining(
            MODEL,
            steps=len(losses),
            seed=int(setting.get("seed", 0)),
        )
        folder = RunFolder(tmp_path / folder_name(setting))
        folder.path.mkdir()
        write_run(folder, Inputs(), config)
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        if held_out is None:
            lines.append({"step": len(losses), "not_finite": ["loss"]})
        else:
            lines.append({"step": len(losses), "held_out_loss": held_out, "scored": 9})
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Planned(setting, folder, Inputs(), config)

    return make


@pytest.fixture
def runs(run, monkeypatch):
    """Five runs of two settings, of which one diverged."""
    monkeypatch.setattr(
        sweep_results, "is_finished", lambda folder: "held_out" in folder.metrics.read_text()
    )
    return [
        run({"seed": "0", "norm": "rms"}, [6.0, 5.0], 2.0),
        run({"seed": "1", "norm": "rms"}, [6.2, 4.8], 2.5),
        run({"seed": "2", "norm": "rms"}, [6.4, 4.7], 2.1),
        run({"seed": "0", "norm": "layer"}, [6.1, 5.5], 2.9),
        run({"seed": "1", "norm": "layer"}, [6.1, 900.0]),
    ]


def test_run_with_skipped_updates_counts_as_diverged_only_if_it_ended_with_them(run):
    planned = run({"seed": "0"}, [6.0, 5.0], 2.0)
    skipped = {"step": 3, "not_finite": ["loss"]}
    skips = replace(planned.config, non_finite="skip")
    for number, ends in ((1, False), (MOST_SKIPPED - 1, False), (MOST_SKIPPED, True)):
        metrics = [{"step": 1, "loss": 6.0}, *[skipped] * number, {"step": 9, "scored": 5}]
        assert has_diverged(skips, metrics) == ends
        assert has_diverged(planned.config, metrics)
    assert not has_diverged(planned.config, [{"step": 9, "scored": 5, "not_finite": ["x"]}])


PAIRS = training_preset("tiny", "encoder-decoder")


@pytest.mark.parametrize(
    ("config", "options", "shares"),
    [
        (TextTraining(MODEL), {"seed": 3, "batch_size": 4}, True),
        (TextTraining(MODEL), {"model": replace(MODEL, norm="rms")}, True),
        (TextTraining(MODEL), {"model": replace(MODEL, vocab_size=400)}, False),
        (TextTraining(MODEL), {"validation_fraction": 0.2}, False),
        (PAIRS, {"optimizer": OptimizerConfig(learning_rate=0.1)}, True),
        (PAIRS, {"seed": 3}, True),
        (PAIRS, {"lowercase": True}, False),
        (PAIRS, {"model": replace(PAIRS.model, max_length=16)}, False),
    ],
)
def test_runs_share_their_data_only_if_their_data_settings_are_equal(config, options, shares):
    first, second = (
        Planned({}, RunFolder("x"), Inputs(), x) for x in (config, replace(config, **options))
    )
    assert (first.data_key() == second.data_key()) == shares


def test_sweep_results_are_means_and_standard_errors_over_the_seeds(runs):
    rms, layer = averages(runs)
    losses = np.array([2.0, 2.5, 2.1])
    assert rms.setting == {"norm": "rms"} and layer.setting == {"norm": "layer"}
    np.testing.assert_allclose(rms.mean, losses.mean())
    np.testing.assert_allclose(rms.error, losses.std(ddof=1) / 3**0.5)
    assert (layer.mean, layer.error) == (2.9, None)
    assert (rms.num_diverged, layer.num_diverged) == (0, 1)


def test_sweep_averages_use_the_common_part_if_runs_scored_unequal_numbers_of_tokens(runs):
    path = runs[0].folder.metrics
    *lines, last = [json.loads(line) for line in path.read_text().splitlines()]
    lines.append({**last, "held_out_loss": 3.0, "scored": 99, "part_loss": 2.0, "part_scored": 9})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert averages(runs)[0].losses == [2.0, 2.5, 2.1]


def test_sweep_table_marks_the_best_mean_and_counts_diverged_runs(runs):
    _, rms, layer = table(averages(runs))
    assert rms.startswith("* norm rms") and "2.2000" in rms and rms.endswith("3")
    assert layer.startswith("  norm layer") and layer.endswith("2, 1 diverged")


def test_sweep_picture_shows_means_that_exclude_diverged_runs(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        sweep_results, "write_figure", lambda figure, *_, **__: drawn.append(figure)
    )
    draw_sweep(averages(runs), tmp_path / "x.png")
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata()[0], 6.2)
    np.testing.assert_allclose(axes.lines[1].get_ydata()[-1], 5.5)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["norm rms", "norm layer (1 of 2 diverged)"]


@pytest.mark.parametrize("values", [("0.001", "0.1"), ("0.1", "0.2")])
def test_sweep_picture_sorts_setting_values_and_uses_logarithmic_axis_for_wide_ranges(
    run, tmp_path, monkeypatch, values
):
    monkeypatch.setattr(sweep_results, "is_finished", lambda folder: True)
    drawn = []
    monkeypatch.setattr(
        sweep_results, "write_figure", lambda figure, *_, **__: drawn.append(figure)
    )
    high, low = reversed(values), values
    runs = [run({"learning-rate": value}, [6.0], float(value)) for value in high]
    draw_sweep(averages(runs), tmp_path / "x.png")
    axes = drawn[0].axes[2]
    for data in (axes.lines[0].get_xdata(), axes.lines[0].get_ydata()):
        np.testing.assert_allclose(np.asarray(data, float), [float(value) for value in low])
    assert axes.get_xscale() == ("log" if values[0] == "0.001" else "linear")
