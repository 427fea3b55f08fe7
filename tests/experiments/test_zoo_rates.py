"""The search for learning rates, on invented losses, and its record."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def valley(best: int, diverges_from: int):
    """Returns an invented loss with one minimum, at the rate 2**best.

    Args:
        best: Binary logarithm of the best rate.
        diverges_from: Binary logarithm of the smallest rate at which training diverges.
    """

    def loss_at(rate: float) -> float:
        place = math.log2(rate)
        return math.inf if place >= diverges_from else 3.0 + abs(place - best)

    return loss_at


@given(best=st.integers(-4, 4), margin=st.integers(1, 9), start=st.integers(-2, 2))
def test_learning_rate_search_ends_when_both_neighbours_of_the_best_rate_are_worse(
    best, margin, start
):
    """Some searches start where training diverges, so the first three losses can be infinite."""
    from zoo_rates import best_of, search

    losses = search(valley(best, best + margin), 2.0**start)
    found = 2.0**best
    assert best_of(losses) == found
    assert losses[found / 2] > losses[found] < losses[2 * found]
    tried = np.log2(sorted(losses))
    assert (np.diff(tried) == 1).all() and {start - 1, start, start + 1} <= set(tried)


@pytest.mark.parametrize("worse", [math.nan, math.inf, 4.0])
def test_learning_rate_search_treats_a_diverged_run_as_worse_than_every_finite_loss(worse):
    from zoo_rates import best_of, search

    losses = {0.5: worse, 1.0: 3.0, 2.0: worse}
    assert best_of(losses) == 1.0
    assert search(losses.__getitem__, 1.0) == losses


@pytest.mark.parametrize("sign", [1, -1])
def test_learning_rate_search_raises_an_error_if_the_loss_has_no_minimum(sign):
    from zoo_rates import MOST_RATES, search

    tried = []

    def loss_at(rate):
        tried.append(rate)
        return sign * math.log2(rate)

    with pytest.raises(ValueError, match="is the smallest or the largest one"):
        search(loss_at, 1.0)
    assert len(tried) == MOST_RATES


def test_learning_rate_search_with_several_seeds_compares_mean_losses():
    """The first seed alone has its lowest loss at 1, but the mean of three seeds has it at 4."""
    from zoo_rates import search_with_seeds

    runs = []

    def loss_of(rate, seed):
        runs.append((rate, seed))
        best = 0 if seed == 0 else 3
        return 3.0 + (math.log2(rate) - best) ** 2

    found = search_with_seeds(loss_of, 1.0, 3)
    assert found.best == 4.0
    assert {rate: len(losses) for rate, losses in found.losses.items()} == {
        rate: 3 for rate in (0.5, 1.0, 2.0, 4.0, 8.0)
    }
    assert len(runs) == len(set(runs)) == 15
    assert found.losses[2.0] == [4.0, 7.0, 7.0]


def test_loss_differences_between_two_learning_rates_are_computed_seed_by_seed():
    """The spread between seeds cancels in the differences between two rates."""
    from zoo_rates import Found, mean_and_error

    found = Found(1.0, {1.0: [3.0, 5.0, 9.0], 2.0: [3.1, 5.2, 9.3], 4.0: [3.2, math.inf, 9.0]})
    assert found.differences(2.0) == pytest.approx([0.1, 0.2, 0.3])
    assert mean_and_error(found.differences(2.0)) == "0.200 ± 0.058"  # 0.1 / √3
    assert mean_and_error([0.2]) == "0.200"
    assert mean_and_error(found.differences(4.0)) == "infinity"
    assert found.figures()["losses"][4.0] == [3.2, None, 9.0]


def test_resumed_learning_rate_search_does_not_repeat_finished_runs(tmp_path):
    """Runs of other models and of other numbers of steps are separate."""
    from zoo_rates import resumable

    runs = []

    def train(rate, seed):
        runs.append((rate, seed))
        return rate + seed

    def losses(name, steps):
        loss_of = resumable(name, train, steps, tmp_path / "runs.jsonl")
        return [loss_of(0.25, 0), loss_of(0.5, 0), loss_of(0.25, 1)]

    expected = [0.25, 0.5, 1.25]
    for name, steps in (("RNN", 300), ("LSTM", 300), ("RNN", 600)):
        runs.clear()
        assert losses(name, steps) == expected and len(runs) == 3
    runs.clear()
    assert losses("RNN", 300) == expected and not runs


def test_zoo_experiment_uses_the_recorded_best_learning_rates_whose_neighbours_are_worse():
    from zoo import PEAKS

    record = json.loads((FOLDER / "results" / "zoo-rates-cpu.json").read_text())
    assert {name: found["best"] for name, found in record["figures"].items()} == PEAKS
    for found in record["figures"].values():
        below, best, above = (
            np.mean(np.array(found["losses"][str(factor * found["best"])], float))
            for factor in (0.5, 1, 2)
        )
        assert not (below <= best or above <= best)  # The loss of a diverged run is NaN here.
