"""Checks that killed runs give the same result, and that damaged checkpoints are detected.

    python experiments/survival.py
    python experiments/survival.py --kills 10 --flips 30

In the first test, the script runs `jaxformer train` with dropout on one core. The script kills the
run by SIGKILL at random moments, mostly while a checkpoint is written, and starts the run again.
Each start must continue from the newest complete checkpoint. The losses and the final parameters
must be bitwise equal to the results of a run without kills.

In the second test, the script changes one byte of a checkpoint or truncates a file. Restoring must
print a warning and use the previous checkpoint.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from record import Parser, at_least, conclude, run

import jaxformer as jf
from jaxformer.artifacts.checkpoint import DIGESTS, Checkpoints
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree

SETTINGS = (
    "--preset tiny --max-length 32 --embed-dim 32 --vocab-size 300 --batch-size 4 --dropout 0.1 "
    "--evaluate-every 200 --checkpoint-every 5 --evaluation-windows 4 --sample-tokens 0"
).split()
STEPS_PER_KILL = 25
# Probabilities that the script kills a run during a save, during training or during the start.
MOMENTS = {"save": 0.6, "training": 0.3, "start": 0.1}
# A kill during the start happens at most this number of seconds after the launch.
LONGEST_START = 10.0

# The new process restricts itself to one core, because JAX would warn about the fork that
# `preexec_fn` requires.
ON_ONE_CORE = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from jaxformer.cli import main
sys.exit(main())
"""


class Run:
    """A run of `jaxformer train` in a separate folder."""

    def __init__(self, where: Path, name: str, steps: int):
        self.where, self.name = where, name
        self.folder = RunFolder(where / name)
        self.words = ["text.py", *SETTINGS, "--steps", str(steps)]

    def start(self) -> subprocess.Popen:
        words = ["--resume"] if self.folder.holds_run else self.words
        cache = {"XDG_CACHE_HOME": str(self.where / "cache"), "NPROC": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", ON_ONE_CORE, "train", *words, "--out", self.name],
            cwd=self.where,
            env={**os.environ, **cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def complete(self) -> int:
        """Returns the step of the newest checkpoint that is complete and has digests, or 0."""
        return max((int(path.parent.name) for path in self._folders(DIGESTS)), default=0)

    def is_saving(self) -> bool:
        """Returns whether a checkpoint is not committed by Orbax or lacks digests."""
        unfinished = any(self.folder.checkpoints.glob("*.orbax-checkpoint-tmp*"))
        committed = len(list(self._folders("_CHECKPOINT_METADATA")))
        return unfinished or committed > len(list(self._folders(DIGESTS)))

    def _folders(self, holding: str):
        return self.folder.checkpoints.glob(f"[0-9]*[0-9]/{holding}") or ()

    def logged(self) -> int:
        """Returns the size of metrics.jsonl in bytes."""
        return self.folder.metrics.stat().st_size if self.folder.metrics.exists() else 0

    def losses(self) -> list[tuple[int, float]]:
        lines = self.folder.read_metrics()
        return [(x["step"], x.get("loss", x.get("held_out_loss"))) for x in lines]

    def digest(self) -> str:
        """Returns the SHA-256 digest of the final parameters."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(jf.load(self.folder.path).variables):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()


def wait_for(process: subprocess.Popen, happened, seconds: float = 60.0) -> None:
    """Waits until `happened()` is True, the process has ended, or `seconds` have passed."""
    end = time.monotonic() + seconds
    while process.poll() is None and not happened() and time.monotonic() < end:
        time.sleep(0.001)


def kill_at_random(run: Run, process: subprocess.Popen, chance: random.Random) -> str | None:
    """Kills the process at a random moment.

    Returns the key of `MOMENTS` that was drawn, or None if the process had already ended.
    """
    aim = chance.choices(list(MOMENTS), MOMENTS.values())[0]
    if aim == "start":
        wait_for(process, lambda: False, chance.uniform(0, LONGEST_START))
    else:
        before = run.logged()
        # The new process writes to metrics.jsonl after its first training steps.
        wait_for(process, lambda: run.logged() > before)
        wait_for(process, lambda: False, chance.uniform(0, 0.6))
        if aim == "save":
            wait_for(process, run.is_saving, 5)
            wait_for(process, lambda: False, chance.uniform(0, 0.05))
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    return aim


def survive(where: Path, kills: int, seed: int) -> dict:
    """Kills a run `kills` times and compares the result with a run without kills."""
    chance, steps = random.Random(seed), STEPS_PER_KILL * kills + 200
    text = "".join(f"def f{i}(x):\n    return x * {i}\n\n\n" for i in range(500))
    (where / "text.py").write_text(text)
    whole, killed = Run(where, "whole", steps), Run(where, "killed", steps)
    said, _ = (process := whole.start()).communicate()
    if process.returncode:
        raise ValueError(f"the reference run failed: {said}")
    print(f"reference run: {steps} steps without a kill", flush=True)

    counts, repeated, expected, began = Counter(), [], 0, time.monotonic()
    while True:
        process = killed.start()
        aim = kill_at_random(killed, process, chance) if counts["kills"] < kills else None
        said, _ = process.communicate()
        check_start(said, expected)
        if aim is None:
            if process.returncode:
                raise ValueError(f"the training process failed: {said}")
            break
        counts.update(["kills", f"aimed at {aim}", *["during a save"] * killed.is_saving()])
        expected = killed.complete()
        reached = max((step for step, _ in killed.losses()), default=0)
        repeated.append(reached - expected)
        if counts["kills"] % 10 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{counts['kills']} kills, step {reached}, {minutes:.1f} min", flush=True)
    return {
        "steps": steps,
        **counts,
        "most steps repeated": max(repeated),
        "losses are equal": whole.losses() == killed.losses(),
        "parameters are equal": whole.digest() == killed.digest(),
        "digest of the parameters": whole.digest()[:16],
    }


def check_start(said: str, expected: int) -> None:
    """Raises ValueError if the process failed, or resumed from a step before `expected`."""
    marker = "resuming from the checkpoint of step "
    if marker in said:
        found = int(said.split(marker)[1].split()[0])
        if found < expected:
            raise ValueError(f"the run resumed from step {found}, but step {expected} was saved")
    elif "Traceback" in said:
        raise ValueError(said)


@contextmanager
def damaged(path: Path, chance: random.Random):
    """Changes one byte of a file or truncates it, and restores it afterwards."""
    whole = path.read_bytes()
    place = chance.randrange(len(whole))
    if chance.random() < 0.5:
        path.write_bytes(whole[:place])
        kind = "cut short"
    else:
        other = bytes([whole[place] ^ chance.randrange(1, 256)])
        path.write_bytes(whole[:place] + other + whole[place + 1 :])
        kind = "a byte changed"
    try:
        yield kind
    finally:
        path.write_bytes(whole)


def damage(folder: RunFolder, flips: int, seed: int) -> dict:
    """Counts how often a damaged checkpoint was detected and the previous checkpoint was used."""
    chance, counts = random.Random(seed), Counter()
    checkpoints = Checkpoints(folder.checkpoints)
    older, newer = checkpoints.steps()
    like = shape_tree(build(jf.load(folder.path).model.config))
    files = [path for path in (folder.checkpoints / str(newer)).rglob("*") if path.is_file()]
    files = [path for path in files if path.stat().st_size]
    for _ in range(flips):
        path = chance.choice(files)
        with damaged(path, chance) as kind, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step, *_ = checkpoints.restore(like)
        noticed = step == older and any("is damaged" in str(x.message) for x in told)
        counts.update([kind, "noticed" if noticed else f"missed in {path.name}"])
    return {"files": len(files), **counts}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--kills", type=at_least(1), default=200)
    parser.add_argument("--flips", type=at_least(0), default=1000)
    parser.add_argument("--seed", type=at_least(0), default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = survive(Path(folder), arguments.kills, arguments.seed)
        print(json.dumps(figures, indent=2), flush=True)
        copy = shutil.copytree(Path(folder) / "whole", Path(folder) / "damaged")
        figures |= {"damage": damage(RunFolder(copy), arguments.flips, arguments.seed)}
    conclude(figures, arguments.record)
    same = figures["losses are equal"] and figures["parameters are equal"]
    if not same or figures["damage"].get("noticed", 0) < arguments.flips:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
