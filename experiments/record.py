"""What an experiment found, kept beside what it takes to find it again."""

import argparse
import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", metavar="NAME", help="write experiments/results/NAME.json")


def run(main) -> None:
    """main(); what it refuses is one line, and exit status 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def conclude(figures, name: str | None) -> None:
    """Print the figures as a line of JSON; if they have a name, keep them under it."""
    print(json.dumps(figures), flush=True)
    if name is not None:
        text = json.dumps({**circumstances(), "figures": figures}, indent=2)
        (FOLDER / f"{name}.json").write_text(text + "\n")


def circumstances() -> dict:
    """The command, the day, the machine and the versions."""
    import jax

    script, *arguments = sys.argv
    names = [Path(given).name if Path(given).exists() else given for given in arguments]
    return {
        "command": " ".join(["python", f"experiments/{Path(script).name}", *names]),
        "date": date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


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
