"""Searches for the best peak learning rate of each model in `zoo.py`.

    python experiments/zoo_rates.py --picture zoo-rates.png

The rates differ by factors of two. The first search trains each model with one seed at three rates
around its rate in `zoo.PEAKS`. It adds rates until the best rate has a worse neighbour on both
sides. The second search starts at this best rate and compares the mean losses of all seeds. A seed
sets the initial weights and the batches, so runs with equal seeds differ only in the rate.

With `--runs FILE`, the script appends the loss of each finished run to the file. If the search is
interrupted, the same command continues it.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from record import at_least, conclude, run
from windows import loss, read_windows, text_parser
from zoo import HELD_OUT, LENGTH, MODELS, PEAKS, VOCAB, build, recipe_of, training_batches

from jaxformer.runtime import tune_cpu_runtime
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.step import init_state, make_step, updates

# A search that reaches this number of rates raises an error.
MOST_RATES = 12
# A function of (peak rate, seed) that trains a model and returns its held-out loss.
LossOf = Callable[[float, int], float]


class Found(NamedTuple):
    """The result of both searches for one model.

    Attributes:
        best: The peak rate with the lowest mean loss. Its neighbours were trained with all seeds.
        losses: The held-out losses of each rate, in order of the seeds. The loss of a diverged run
            is not finite.
    """

    best: float
    losses: dict[float, list[float]]

    def differences(self, rate: float) -> list[float]:
        """Returns the loss at a rate minus the loss at the best rate, in order of the seeds.

        Args:
            rate: A rate that was trained with all seeds.
        """
        return np.subtract(self.losses[rate], self.losses[self.best]).tolist()

    def figures(self) -> dict:
        """Returns the values for JSON. The loss of a diverged run is None."""
        losses = {
            rate: [x if np.isfinite(x) else None for x in values]
            for rate, values in self.losses.items()
        }
        return {"best": self.best, "losses": losses}


def best_of(losses: dict[float, float]) -> float:
    """Returns the rate with the lowest loss, or the smallest of several such rates.

    A loss that is not finite is worse than each finite loss.
    """
    return min(losses, key=lambda x: (losses[x] if np.isfinite(losses[x]) else np.inf, x))


def search(loss_at: Callable[[float], float], start: float) -> dict[float, float]:
    """Tries rates until the best rate has neighbours at half and at twice the rate.

    Args:
        loss_at: Returns the loss of training at a rate.
        start: The middle one of the first three rates.

    Returns:
        The loss of each rate.

    Raises:
        ValueError: The best of `MOST_RATES` rates is still the smallest or the largest one.
    """
    losses = {}
    new = [start / 2, start, 2 * start]
    while new:
        if len(losses) == MOST_RATES:
            raise ValueError(
                f"the best of {MOST_RATES} rates from {min(losses):.2g} to {max(losses):.2g} "
                "is the smallest or the largest one; start the search at another rate"
            )
        losses |= {rate: loss_at(rate) for rate in new}
        best = best_of(losses)
        new = [rate for rate in (best / 2, 2 * best) if rate not in losses]
    return losses


def search_with_seeds(loss_of: LossOf, start: float, num_seeds: int) -> Found:
    """Searches with the first seed, and then with all seeds around the best rate.

    Args:
        loss_of: Trains the model.
        start: The middle one of the first three rates.
        num_seeds: The number of seeds of the second search.
    """
    loss_of, losses = cache(loss_of), {}

    def mean(count: int, rate: float) -> float:
        losses[rate] = [loss_of(rate, seed) for seed in range(count)]
        return float(np.mean(losses[rate]))

    found = best_of(search(partial(mean, 1), start))
    best = best_of(search(partial(mean, num_seeds), found))
    return Found(best, dict(sorted(losses.items())))


def trainer(name: str, ids, held_out, steps: int) -> LossOf:
    """Returns a function of (peak rate, seed) that trains a model and returns its held-out loss.

    One compiled step serves all rates and seeds.
    """
    model = build(name)
    optimizer = make_optimizer(recipe_of(PEAKS[name]))
    begin = jax.jit(partial(init_state, model, optimizer))
    step, score = make_step(model, optimizer), jax.jit(partial(loss, model))

    def train(rate: float, seed: int) -> float:
        start, data = begin(np.uint32(seed)), training_batches(ids, seed)
        rates = Schedule(recipe_of(rate), steps).rates()
        for state, _ in updates(step, start, data, rates):  # noqa: B007 (the last one is used)
            pass
        found = float(score(state.params, held_out))
        print(f"{name:12} rate {rate:g}, seed {seed}: {found:.3f} nats", flush=True)
        return found

    return train


def resumable(name: str, train: LossOf, steps: int, file: Path) -> LossOf:
    """Wraps `train`: reads the losses of finished runs from a file, and appends each new loss.

    Args:
        name: The name of the model.
        train: Trains the model.
        steps: The number of steps of each run.
        file: Each line has the name, the number of steps, the rate, the seed and the loss of a run.
    """
    file.touch()
    lines = map(json.loads, file.read_text().splitlines())
    finished = {tuple(run_of_line): found for *run_of_line, found in lines}

    def loss_of(rate: float, seed: int) -> float:
        this_run = (name, steps, rate, seed)
        if this_run not in finished:
            finished[this_run] = train(rate, seed)
            with file.open("a") as opened:
                opened.write(json.dumps([*this_run, finished[this_run]]) + "\n")
        return finished[this_run]

    return loss_of


def table(results: dict[str, Found]) -> str:
    """Returns a table of the mean losses, with a row for each rate and a column for each model.

    The number of seeds stands in parentheses. An asterisk marks the best rate of a model.
    """

    def cell(found: Found, rate: float) -> str:
        if rate not in found.losses:
            return ""
        values = found.losses[rate]
        mean = f"{np.mean(values):.3f}" if np.isfinite(values).all() else "diverged"
        return f"{mean} ({len(values)}){'*' if rate == found.best else ' '}"

    rates = sorted({rate for found in results.values() for rate in found.losses})
    lines = ["peak rate " + "".join(f"{name:>16}" for name in results)]
    for rate in rates:
        lines.append(f"{rate:<10g}" + "".join(f"{cell(x, rate):>16}" for x in results.values()))
    return "\n".join(lines)


def mean_and_error(values: list[float]) -> str:
    """Returns the mean, and the standard error if there are several values, as text."""
    if not np.isfinite(values).all():
        return "infinity"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{error}"


def draw(results: dict[str, Found], path: Path) -> None:
    """Plots the loss against the rate: a point for each run and a line through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, found) in enumerate(results.items()):
        colour, means = f"C{number}", {rate: np.mean(x) for rate, x in found.losses.items()}
        axes.plot(list(means), list(means.values()), color=colour, label=name)
        for rate, values in found.losses.items():
            axes.plot([rate] * len(values), values, ".", color=colour, alpha=0.6)
        axes.plot(found.best, means[found.best], "o", color=colour, markersize=9)
    axes.set(xlabel="peak learning rate", ylabel="held-out loss (nats per token)", xscale="log")
    rates = sorted({rate for found in results.values() for rate in found.losses})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.grid(alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = text_parser(__doc__, 300, 2, "zoo-rates.png")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--runs", type=Path, help="file of finished runs, which are not repeated")
    arguments = parser.parse_args()
    tune_cpu_runtime()
    _, ids, held_out, _ = read_windows(arguments.text, VOCAB, LENGTH, HELD_OUT)
    results = {}
    for name in MODELS:
        train = trainer(name, ids, held_out, arguments.steps)
        if arguments.runs:
            train = resumable(name, train, arguments.steps, arguments.runs)
        results[name] = search_with_seeds(train, PEAKS[name], arguments.seeds)
    print(table(results))
    for name, found in results.items():
        half, twice = (mean_and_error(found.differences(x * found.best)) for x in (0.5, 2))
        print(
            f"{name}: the best rate is {found.best:g}. At half this rate, the loss is higher by "
            f"{half}; at twice this rate, it is higher by {twice}."
        )
    conclude({name: found.figures() for name, found in results.items()}, arguments.record)
    draw(results, arguments.picture)


if __name__ == "__main__":
    run(main)
