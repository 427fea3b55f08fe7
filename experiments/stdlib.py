"""Times `jaxformer train` without arguments, and records its results.

    python experiments/stdlib.py --record stdlib-cpu --picture stdlib-loss.png

The command runs as a separate process in an empty folder without a compilation cache, as for a new
user after the installation. The time of the whole process is measured.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Parser, conclude, picture, run


def main():
    parser = Parser(__doc__)
    parser.add_argument("--picture", type=picture, default="stdlib-loss.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "jaxformer", "train"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        seconds = time.perf_counter() - begin
        made = Path(folder) / "runs" / "stdlib"
        lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        final = [line for line in lines if "bits_per_byte" in line][-1]
        baselines = json.loads((made / "tokens" / "baselines.json").read_text())
        conclude({"seconds": round(seconds, 1), **final, **baselines}, arguments.record)
        shutil.copy(made / "loss.png", arguments.picture)


if __name__ == "__main__":
    run(main)
