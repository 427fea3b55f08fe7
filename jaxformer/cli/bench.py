"""`jaxformer bench`: measures the speed of this machine with the package's own programs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxformer.artifacts.files import json_text, next_free, require_new, write_json
from jaxformer.cli.arguments import parse
from jaxformer.cli.flags import OutFile, Switch, check_out
from jaxformer.terminal import say

if TYPE_CHECKING:
    from jaxformer.bench.measurement import Measurement
    from jaxformer.bench.suite import Results


@dataclass(frozen=True)
class BenchArguments:
    """Measure this machine: training, decoding and attention, compared with the hardware's limits.

    The benchmark takes at most ten minutes. The measurements are matrix products, memory, training
    steps, decoding, the time to the first token, attention and, with several devices, collectives.
    The results are printed as a table and written to a JSON file and a roofline picture (.png).
    """

    out: OutFile = None
    """the .json file to write, which must not exist; default: bench.json, or bench-2.json, … if
    that exists"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the models and of attention; default: float32 on CPUs, bfloat16 elsewhere"""
    seconds: float = 480.0
    """time budget in seconds; parts that would probably exceed it are skipped"""
    quick: Switch = False
    """measure tiny programs in a few seconds, to test the benchmark itself"""
    json: Switch = False
    """print one JSON object and nothing else"""

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_out(self.out, ".json")
        for path in (self.out, self.out.with_suffix(".png")) if self.out else ():
            require_new(path)
        if not (math.isfinite(self.seconds) and 0 < self.seconds <= 540):
            raise ValueError(f"seconds is {self.seconds}; it must be above 0 and at most 540")


def main(argv: list[str]) -> int:
    """Measures this machine, prints the results, and writes the JSON file and the picture."""
    arguments = parse(BenchArguments, "bench", argv)
    from jaxformer.runtime import start_jax

    start_jax()
    from jaxformer.bench.measurement import Ceilings
    from jaxformer.bench.report import draw_roofline, results_json, results_table
    from jaxformer.bench.suite import machine
    from jaxformer.training.devices import device_specs

    here = machine()
    usual = "float32" if here["platform"] == "cpu" else "bfloat16"
    dtype = arguments.dtype or usual
    results = _measure(arguments, dtype, here)
    ceilings = Ceilings.of(results.measurements, device_specs(here["device"]))
    found = {"machine": here, "dtype": dtype, "quick": arguments.quick}
    found |= results_json(results, ceilings)
    path = arguments.out or next_free(Path(), "bench", ".json", ".png")
    picture = path.with_suffix(".png")
    device = here["processor"] if here["platform"] == "cpu" else here["device"]
    title = f"{here['devices']} × {device}, {dtype}"
    draw_roofline(results.measurements, ceilings, title, picture)
    write_json(path, found)
    if arguments.json:
        say(json_text(found))
        return 0
    say(f"jaxformer bench: {title}\n\n{results_table(results, ceilings, here['devices'])}")
    say(f"\nfigures: {path}\npicture: {picture}")
    return 0


def _measure(
    arguments: BenchArguments, dtype: Literal["float32", "bfloat16"], here: dict
) -> "Results":
    """Runs all parts of the benchmark, shows the progress and returns the `Results`."""
    from jaxformer.bench.suite import plan_for, run_parts, suite_parts
    from jaxformer.training.screen import Screen

    plan = plan_for(here["platform"], here["memory"], here["devices"], arguments.quick)
    parts = list(suite_parts(plan, dtype))
    screen, done = Screen(stderr=True, quiet=arguments.json), count(1)
    with screen.count(len(parts), "measured", "parts") as advance:
        advance(0)

        def show(name: str, run: Callable[[], list["Measurement"]]) -> list["Measurement"]:
            with screen.waiting(f"measuring {name}"):
                found = run()
            advance(next(done))
            return found

        return run_parts(parts, arguments.seconds, show)
