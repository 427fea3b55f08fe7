"""`jaxformer compare RUN RUN…`: compares runs in a table and a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxformer.artifacts.files import json_text, next_free
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import OutFile, Switch, check_out, positional
from jaxformer.terminal import say


@dataclass(frozen=True)
class CompareArguments:
    """Print the results and differing settings of runs, and draw their losses in one picture."""

    runs: Annotated[tuple[Path, ...], positional("RUN…")]
    """folders of one or more runs"""
    out: OutFile = None
    """the .png file to write; default: compare.png, or compare-2.png, … if that exists"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_out(self.out, ".png")


def main(argv: list[str]) -> int:
    """Reads the runs, draws the picture and prints the comparison."""
    arguments = parse(CompareArguments, "compare", argv)
    from jaxformer.training.compare import changed, difference, draw, read_runs, summary

    runs = read_runs(list(arguments.runs))
    found, settings = [summary(run) for run in runs], changed(runs)
    path = arguments.out or next_free(Path(), "compare", ".png")
    draw(runs, path)
    if arguments.json:
        content = {
            "runs": found,
            "settings": settings,
            "not_comparable": difference(runs),
            "picture": str(path),
        }
        say(json_text(content, default=str))
        return 0
    names = dict.fromkeys(name for run in found for name in run)
    rows = {name: [run.get(name) for run in found] for name in names}
    _print_table(rows | {name: x for name, x in settings.items() if name not in rows})
    if why := difference(runs):
        say(f"the losses cannot be compared: the runs have {why}")
    say(f"picture: {path}")
    return 0


def _print_table(rows: dict[str, list]) -> None:
    """Prints a table with one line per result or setting and one column per run."""
    texts = {name.replace("_", " "): list(map(_said, values)) for name, values in rows.items()}
    widths = [max(map(len, column)) for column in zip(*texts.values(), strict=True)]
    left = max(map(len, texts))
    for name, values in texts.items():
        cells = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        say(f"{name:{left}}  {'  '.join(cells)}")


def _said(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
