"""What an experiment found, kept beside what it takes to find it again."""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")


class Parser(argparse.ArgumentParser):
    """The command line of an experiment; what it refuses is a ValueError: see `run`."""

    def __init__(self, description: str):
        super().__init__(description=description.splitlines()[0])
        self.add_argument("--record", metavar="NAME", help="write experiments/results/NAME.json")

    def error(self, message):
        raise ValueError(message)


def at_least(least: int):
    """The type of an argument that is a whole number."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least {least}")
        return int(text)

    return number


def run(main) -> None:
    """main(); what it refuses is one line, and exit status 2 (130 for Ctrl-C)."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        sys.exit(130)


def conclude(figures, name: str | None) -> None:
    """Print the figures as a line of JSON; if they have a name, keep them under it."""
    print(json.dumps(figures), flush=True)
    if name is not None:
        text = json.dumps({**circumstances(), "figures": figures}, indent=2)
        (FOLDER / f"{name}.json").write_text(text + "\n")


def circumstances() -> dict:
    """The command, the day, the code, the machine and the versions."""
    import jax

    script, *arguments = sys.argv
    names = [Path(given).name if Path(given).exists() else given for given in arguments]
    return {
        "command": " ".join(["python", f"experiments/{Path(script).name}", *names]),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """The code that ran; "-dirty" at its end: changed since that commit."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
