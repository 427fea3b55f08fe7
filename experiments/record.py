"""Command lines of experiments, and JSON records of their results.

`python experiments/record.py NAME COMMAND…` runs any other command and writes results/NAME.json.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")
PICTURES = (".png", ".svg", ".pdf")
INSTALLED_BY = {
    **dict.fromkeys(("babel", "sacrebleu"), "pip install -e '.[experiments]'"),
    "playwright": "pip install playwright",
    **dict.fromkeys(("torch", "transformers"), "pip install torch==2.13.0 'transformers>=5'"),
}


class Parser(argparse.ArgumentParser):
    """Command line parser of an experiment, which raises errors as ValueError."""

    picture: Path | None = None

    def __init__(self, description: str):
        super().__init__(description=description.splitlines()[0])
        self.add_argument("--record", metavar="NAME", help="write experiments/results/NAME.json")

    def error(self, message):
        raise ValueError(message)

    def parse_args(self, *arguments, **options):
        """Parses the arguments, and stores the path of the picture for `run` to announce."""
        parsed = super().parse_args(*arguments, **options)
        Parser.picture = getattr(parsed, "picture", None)
        return parsed


def at_least(least: int):
    """Returns an argument type that accepts whole numbers of at least `least`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not accepted; it must be a whole number of at least {least}"
            )
        return int(text)

    return number


def picture(text: str) -> Path:
    """Parses the path of a picture. An invalid path is rejected before the experiment runs."""
    path = Path(text)
    if path.suffix not in PICTURES or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; it must end in {', '.join(PICTURES)}, "
            "and its folder must exist"
        )
    return path


def require(*packages: str) -> None:
    """Raises ValueError with the installation command if a package is missing."""
    for name in packages:
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; run: {INSTALLED_BY[name]}")


def run(main) -> None:
    """Runs main() and prints the path of the picture that it drew.

    Errors are printed as one line, with exit status 2 (130 for Ctrl-C).
    """
    try:
        main()
        if Parser.picture is not None:
            print(f"picture: {Parser.picture}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        sys.exit(130)


def conclude(figures, name: str | None) -> None:
    """Prints the results as a line of JSON and, with a name, writes them to results/NAME.json."""
    print(json.dumps(figures), flush=True)
    if name is not None:
        text = json.dumps({**circumstances(), "figures": figures}, indent=2)
        (FOLDER / f"{name}.json").write_text(text + "\n")


def circumstances() -> dict:
    """Returns the command, date, commit, machine and package versions."""
    import jax

    from jaxformer.bench.suite import processor

    script, *arguments = sys.argv
    names = [Path(given).name if Path(given).exists() else given for given in arguments]
    return {
        "command": " ".join(["python", f"experiments/{Path(script).name}", *names]),
        "date": date.today().isoformat(),
        "commit": COMMIT,
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    """Returns the commit, with the suffix "-dirty" if the code differs from the commit."""

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


# The commit is determined at the start, because it may change while the experiment runs.
COMMIT = _commit()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def record_command(name: str, command: list[str]) -> None:
    """Runs a command and records the exit status, the time and the output.

    The record contains the output if it is JSON, and otherwise the last line of the output.
    """
    begin, lines = time.perf_counter(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    figures = {"exit_status": process.returncode, "seconds": time.perf_counter() - begin}
    try:
        figures["output"] = json.loads("".join(lines))
    except json.JSONDecodeError:
        figures["output"] = lines[-1].strip() if lines else ""
    conclude(figures, name)


if __name__ == "__main__":
    record_command(sys.argv[1], sys.argv[2:])
