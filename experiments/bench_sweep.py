"""Measures a sweep of 30 runs, compared with three single runs.

    python experiments/bench_sweep.py --record sweep-cpu --picture experiments/results/sweep.png

The sweep has 5 seeds, 3 learning rates and 2 norms, with the preset tiny on the source code of
Python's standard library. The single runs are `jaxformer train` with three seeds. Each command is a
new process; the cache of compiled programs is empty before the sweep and before the first single
run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Parser, conclude, run

VARIED = ["seed=0..4", "learning-rate=0.001,0.003,0.01", "norm=rms,layer"]


def seconds(folder: Path, cache: str, *words: str) -> float:
    """Returns the time of a command in a new process."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / cache)}
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "jaxformer", *words],
        env=environment,
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - begin


def main():
    parser = Parser(__doc__)
    parser.add_argument("--picture", type=Path, help="write the picture of the sweep to this file")
    arguments = parser.parse_args()
    varied = [word for words in VARIED for word in ("--vary", words)]
    preset = ("--preset", "tiny")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        single = [
            seconds(folder, "one", "train", *preset, "--seed", str(seed), "--out", f"run-{seed}")
            for seed in range(3)
        ]
        swept = seconds(folder, "all", "sweep", *preset, *varied, "--out", "sweep")
        again = seconds(folder, "all", "sweep", *preset, *varied, "--out", "again")
        results = json.loads((folder / "sweep" / "results.json").read_text())["settings"]
        if arguments.picture:
            shutil.copy(folder / "sweep" / "sweep.png", arguments.picture)
    figures = {
        "runs": sum(setting["runs"] for setting in results),
        "seconds_of_single_runs": single,
        "seconds_of_sweep": swept,
        "seconds_of_sweep_with_compiled_programs": again,
        "ratio_to_three_single_runs": swept / sum(single),
        "settings": results,
    }
    conclude(figures, arguments.record)


if __name__ == "__main__":
    run(main)
