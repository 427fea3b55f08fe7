"""What an experiment found, kept beside what it takes to find it again."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")
PICTURES = (".png", ".svg", ".pdf")
INSTALLED_BY = {
    **dict.fromkeys(("babel", "sacrebleu"), "pip install -e '.[experiments]'"),
    **dict.fromkeys(("torch", "transformers"), "pip install torch==2.13.0 'transformers>=5'"),
}


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
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not accepted; it must be a whole number of at least {least}"
            )
        return int(text)

    return number


def picture(text: str) -> Path:
    """The type of an argument that names a picture to be drawn: refused before, not after, what it
    is to show has been found."""
    path = Path(text)
    if path.suffix not in PICTURES or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; it must end in {', '.join(PICTURES)} and its folder exist"
        )
    return path


def require(*packages: str) -> None:
    """ValueError, and how to install it, if one is missing that the experiment will need."""
    for name in packages:
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; {INSTALLED_BY[name]}")


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
        "commit": COMMIT,
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """The code as it is now; "-dirty" at its end: changed since that commit."""

    def git(*words):
        command = ["git", *words]
        return subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, check=True
        ).stdout

    try:
        changed = git("status", "--porcelain", "-uno", "--", ":/jaxformer", ":/experiments/*.py")
        return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


COMMIT = _commit()  # of what is about to run, whatever is committed meanwhile


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
