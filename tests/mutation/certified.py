"""Shows that the certificate of a trained run detects bugs in the code.

python -m tests.mutation.certified runs/stdlib    # exit status 0 if each bug fails its property at
                                                  # a named layer and the sound code passes

It runs `jaxformer verify` on a copy of the run, with one bug after another and the same weights.
For the bug of windows it sets a window in the copy's config.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.bug import PROJECT, Bug, environment
from tests.mutation.bugs import BUGS

# The bugs to try, and the property that must fail.
TOLD = {
    "the causal mask shows the next token": "causal",
    "a sliding window has one token too many": "causal",
    "positions do not restart in a packed document": "packed = separate",
    "cached tokens are read one position too far": "cached = full",
    "norm statistics are computed over the batch": "batch-independent",
}
WINDOW = 16


def verify(bug: Bug | None, run: Path) -> list[dict]:
    """Runs `jaxformer verify` with the bug and returns the properties of its report."""
    command = [sys.executable, "-m", "jaxformer", "verify", str(run), "--json"]
    environ = os.environ if bug is None else environment(bug)
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"verify ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)["properties"]


def prepared(run: Path, folder: Path, window: int | None) -> Path:
    """Copies the run and sets a window in its config."""
    copy = Path(shutil.copytree(run, folder / "run", ignore=shutil.ignore_patterns("tokens")))
    config = json.loads((copy / "config.json").read_text())
    config["model"]["window"] = window
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def told(name: str, bug: Bug | None, run: Path) -> bool:
    """Prints which properties fail. Returns whether they are the expected ones."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = prepared(run, Path(folder), WINDOW if "window" in name else None)
        found = verify(bug, copy)
    failed = {entry["name"]: entry["layer"] for entry in found if not entry["holds"]}
    places = (f"{name}, {layer or 'no layer named'}" for name, layer in failed.items())
    said = "; ".join(places) or "all hold"
    print(f"{name:45} {time.perf_counter() - begin:4.0f} s  {said}", flush=True)
    return not failed if bug is None else failed.get(TOLD[name]) is not None


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python -m tests.mutation.certified RUN (a folder made by `jaxformer train`)")
        return 2
    run = Path(sys.argv[1])
    bugs = {bug.name: bug for bug in BUGS}
    cases = {"sound": None, "sound, with a window": None}
    cases |= {name: bugs[name] for name in TOLD}
    return int(not all([told(name, bug, run) for name, bug in cases.items()]))


if __name__ == "__main__":
    sys.exit(main())
