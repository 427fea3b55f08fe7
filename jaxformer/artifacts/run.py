"""A run folder: config.json, tokenizer.json, documents.txt, tokens/, checkpoints/, metrics.jsonl,
loss.png and samples.txt; and lock, which the process that trains in it holds."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from jaxformer.models.config import KINDS

FORMAT = 1
_HEADER = re.compile(r"(?m)^---- step (\d+)\n")  # before each sample in samples.txt


class RunFolder:
    """The paths of a run, and its small files."""

    def __init__(self, path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.lock = self.path / "lock"
        self.tokenizer = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "loss.png"
        self.samples = self.path / "samples.txt"
        self.profile = self.path / "profile"
        self.tracker_id = self.path / "tracker-id"
        self.documents = self.path / "documents.txt"
        self.tokens = self.path / "tokens"
        self.train_tokens = self.tokens / "train.bin"
        self.baselines = self.tokens / "baselines.json"
        self.held_out_tokens = self.tokens / "held_out.bin"
        sides = [("train", "held_out"), ("source", "target")]
        self.pairs = {
            part: [self.tokens / f"{part}.{side}.bin" for side in sides[1]] for part in sides[0]
        }
        self.references = self.tokens / "references.json"
        self.base = self.path / "base"  # the run that an adapter is of, as it was

    @property
    def holds_run(self) -> bool:
        return self.config.exists()

    @property
    def is_free(self) -> bool:
        """Whether nothing is there, or what a start left that was killed before it had a config."""
        if not self.path.exists():
            return True
        left = {path.name for path in self.path.iterdir()}
        ours = (self.lock.name, self.base.name, self.tokenizer.name, f"{self.config.name}.")
        started = self.lock.name in left and all(name.startswith(ours) for name in left)
        return not left or (started and not self.holds_run)

    def write_config(self, sections: dict) -> None:
        """The run's config: sections by name, each of them a dataclass or plain data."""
        plain = {
            name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
            for name, value in sections.items()
        }
        write_whole(self.config, json.dumps({"format": FORMAT, **plain}, indent=2) + "\n")

    def read_config(self, *needed: str) -> dict:
        """The sections as plain data; ValueError names the file and what is wrong with it, or what
        is needed and not there."""
        if not self.config.exists():
            raise ValueError(f"{self.path} holds no run (there is no {self.config.name} in it)")
        try:
            sections = json.loads(self.config.read_text())
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.config} cannot be read: {error}") from None
        if not isinstance(sections, dict) or sections.get("format") != FORMAT:
            found = sections.get("format") if isinstance(sections, dict) else None
            raise ValueError(f"{self.config} has format {found!r}; this version reads {FORMAT}")
        for name in needed:
            if name not in sections:
                raise ValueError(f"{self.config} has no section {name!r}")
        return sections

    def cut_after(self, step: int) -> None:
        """Drop what was written down after `step`, and what a kill left half written."""
        samples = [sample for sample in self.read_samples() if sample[0] <= step]
        if self.samples.exists():
            write_whole(self.samples, "".join(_section(*sample) for sample in samples))
        lines = [line for line in self.read_metrics() if line["step"] <= step]
        if self.metrics.exists():
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def add_sample(self, step: int, text: str) -> None:
        """Append a sample to samples.txt."""
        with self.samples.open("ab") as file:
            file.write(_section(step, text).encode())

    def read_samples(self) -> list[tuple[int, str]]:
        """(step, text) of each sample; of one that a kill left half written, its whole lines."""
        parts = _HEADER.split(_whole_lines(self.samples))
        numbered = zip(parts[1::2], parts[2::2], strict=True)
        return [(int(number), text.removesuffix("\n")) for number, text in numbered if text]

    def read_metrics(self) -> list[dict]:
        """One dict a line: `step` and what was measured then; up to one that is not whole.

        An evaluation has `held_out_loss` (nats per token) and `bits_per_byte` over `scored` tokens.
        They are the same windows each time, but all of the held-out text at the end of a run: that
        line has the windows' own score as `part_loss`, `part_bits_per_byte` and `part_scored`. What
        was not finite is left out, and its name is in `not_finite`.
        """
        found = []
        for line in _whole_lines(self.metrics).split("\n")[:-1]:
            try:
                found.append(dict(json.loads(line)))
            except (TypeError, ValueError):
                break
        return found


def _whole_lines(path: Path) -> str:
    """The text of a file that lines are appended to (none if it is not there), without what a kill
    left of the last one, perhaps in the middle of a character."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].decode(errors="replace")


def _section(step: int, text: str) -> str:
    """A sample as it stands in samples.txt."""
    return f"---- step {step}\n{text}\n"


def next_free(folder: Path, name: str) -> Path:
    """folder/name, or the first of folder/name-2, -3, … that does not exist yet."""
    candidate, number = folder / name, 1
    while candidate.exists():
        number += 1
        candidate = folder / f"{name}-{number}"
    return candidate


def newest(folder: Path, name: str) -> Path:
    """The last of the names that `next_free` gives out, for resuming a run without naming it."""
    numbered = [
        (int(suffix or 1), path)
        for path in folder.glob(f"{name}*")
        if (suffix := path.name[len(name) :].removeprefix("-")) == "" or suffix.isdecimal()
    ]
    if not numbered:
        raise ValueError(f"{folder / name} does not exist, so there is nothing to resume")
    return max(numbered)[1]


def parse_config(kind, fields: dict, where) -> object:
    """`kind(**fields)` for a frozen dataclass, refusing what it does not know or accept."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} has {fields!r} where the fields of {kind.__name__} should be")
    unknown = set(fields) - set(kind.__dataclass_fields__)
    if unknown:
        raise ValueError(f"{where} has fields that {kind.__name__} does not: {sorted(unknown)}")
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def parse_kind(sections: dict, where):
    """The model's config by its kind; a file without one is of a decoder."""
    kind = sections.get("kind", "decoder")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    return parse_config(KINDS[kind], sections["model"], where)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, finds the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_whole(path: Path):
    """The JSON that `write_whole` wrote; ValueError that names the file if that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
