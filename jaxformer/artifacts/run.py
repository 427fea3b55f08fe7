"""A run folder: its paths, its small files, and the checkpoint that the run started from.

It holds config.json, tokenizer.json, documents.txt, tokens/, checkpoints/, metrics.jsonl, loss.png,
samples.txt and lock. The process that trains in the folder holds a lock on `lock`.
"""

import os
import re
import shutil
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.artifacts.files import (
    check_links,
    json_text,
    parse_json,
    read_json,
    write_json,
    write_whole,
)
from jaxformer.artifacts.tokenizer_files import NAMES
from jaxformer.models.config import KINDS
from jaxformer.models.config.check import converted, from_fields, shown
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.config.model import CheckpointDType

RUN_FORMAT = 2  # changes whenever a file of a run or of a saved folder changes
# Types of the sections of config.json in a run or a saved folder. `parse_config` checks the fields
# of the objects.
SECTIONS: dict[str, Any] = {
    "format": int,
    "kind": Literal[tuple(KINDS)],  # pyrefly: ignore[invalid-literal] (computed)
    "model": dict,
    "training": dict,
    "objective": str,  # of a run of a script (`training.fit`)
    "text": tuple[Path, ...] | None,
    "source": Path | None,
    "target": Path | None,
    "from": dict[str, str],
    "family": str | None,
    "generation": dict,
    "special_tokens": dict | None,
    "parse_special": bool,
    "checkpoint_dtype": CheckpointDType | None,
    "layers": list,
}
_HEADER = re.compile(r"(?m)^---- step (\d+)\n")  # before each sample in samples.txt
# A line of a sample that looks like a header is written with one more space before it.
_LIKE_HEADER = re.compile(r"(?m)^(?= *---- step \d+$)")
_INDENTED = re.compile(r"(?m)^ (?= *---- step \d+$)")


class RunFolder:
    """The paths of a run, and methods for its small files."""

    def __init__(self, path: str | Path):
        """Names the paths; nothing is read or created.

        Args:
            path: The folder of the run.
        """
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
        self.pairs = {
            part: [self.tokens / f"{part}.{side}.bin" for side in ("source", "target")]
            for part in ("train", "held_out")
        }
        self.references = self.tokens / "references.json"
        self.base = self.path / "base"  # copy of the run whose weights the adapter updates

    @property
    def holds_run(self) -> bool:
        """Whether the folder has a config.json."""
        return self.config.exists()

    @property
    def is_free(self) -> bool:
        """Whether a run may start here: no folder, an empty one, or one of an interrupted start.

        An interrupted start was killed before it wrote a config.json.
        """
        if not self.path.exists():
            return True
        left = {path.name for path in self.path.iterdir()}
        ours = (self.lock.name, self.base.name, self.tokenizer.name, *NAMES, f"{self.config.name}.")
        return not left or (self.lock.name in left and all(name.startswith(ours) for name in left))

    def write_config(self, sections: dict) -> None:
        """Writes config.json.

        Args:
            sections: Sections by name, each a dataclass or plain data.
        """
        plain = {name: asdict(x) if is_dataclass(x) else x for name, x in sections.items()}
        write_json(self.config, {"format": RUN_FORMAT, **plain})

    def read_config(self, *needed: str) -> dict:
        """Returns the sections of config.json by name.

        Args:
            *needed: Names of sections that must be there.

        Raises:
            ValueError: If there is no run, or a section is wrong or missing. The message names it.
        """
        if not self.config.exists():
            raise ValueError(f"{self.path} holds no run (there is no {self.config.name} in it)")
        sections = read_sections(self.path)
        if sections is None:
            raise ValueError(f"{self.config} has format None; this version reads {RUN_FORMAT}")
        for name in needed:
            if name not in sections:
                raise ValueError(f"{self.config} has no section {name!r}")
        return sections

    def cut_after(self, step: int) -> None:
        """Removes samples and metrics after `step`, and incompletely written ones."""
        samples = [sample for sample in self.read_samples() if sample[0] <= step]
        if self.samples.exists():
            write_whole(self.samples, "".join(_section(*sample) for sample in samples))
        lines = [line for line in self.read_metrics() if line["step"] <= step]
        if self.metrics.exists():
            write_whole(self.metrics, "".join(json_text(line) + "\n" for line in lines))

    def add_sample(self, step: int, text: str) -> None:
        """Appends a sample to samples.txt."""
        with self.samples.open("ab") as file:
            file.write(_section(step, text).encode())

    def read_samples(self) -> list[tuple[int, str]]:
        """Returns (step, text) of each sample, without an incomplete last line."""
        parts = _HEADER.split(_whole_lines(self.samples))
        numbered = zip(parts[1::2], parts[2::2], strict=True)
        return [
            (int(number), _INDENTED.sub("", text.removesuffix("\n")))
            for number, text in numbered
            if text
        ]

    def read_metrics(self) -> list[dict]:
        """Returns one dict per line of metrics.jsonl: `step` and the measurements of that step.

        Reading stops before the first line that is incomplete or no JSON object.

        An evaluation has `held_out_loss` (nats per token) and `bits_per_byte` over `scored` tokens.
        All evaluations score the same windows, except the last one of a run, which scores the whole
        held-out text. Its line has the score of the windows as `part_loss`, `part_bits_per_byte`
        and `part_scored`. A value that is not finite is left out, and its name is in `not_finite`.
        """
        lines = []
        for line in _whole_lines(self.metrics).split("\n")[:-1]:
            try:
                lines.append(converted("line", parse_json(line), dict[str, Any]))
            except ValueError:
                break
            if type(lines[-1].get("step")) is not int:
                raise ValueError(f"{self.metrics}: line {len(lines)} has no whole number as step")
        return lines


def _whole_lines(path: Path) -> str:
    """Returns the complete lines of a file that is appended to; "" if there is no file.

    A killed process may leave an incomplete last line, which may end within a character.
    """
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].decode(errors="replace")


def _section(step: int, text: str) -> str:
    """Returns a sample in the format of samples.txt."""
    return f"---- step {step}\n{_LIKE_HEADER.sub(' ', text)}\n"


def read_sections(folder: Path) -> dict | None:
    """Returns the sections of config.json by name; None if the folder has another format.

    Raises:
        ValueError: If a section is unknown or wrong, or a link leads out of the folder. The message
            names the file and the section.
    """
    path = folder / "config.json"
    check_links(folder, whole_tree=False)
    content = read_json(path)
    if "format" not in content:
        return None
    check_links(folder, whole_tree=True)
    version = content["format"]
    if type(version) is not int or version != RUN_FORMAT:
        raise ValueError(f"{path} has format {shown(version)}; this version reads {RUN_FORMAT}")
    if "model" not in content:
        raise ValueError(f"{path} has no section 'model'")
    for name in content:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ValueError(f"{path} has a section {shown(name)}; the sections are {known}")
    try:
        return {name: converted(name, value, SECTIONS[name]) for name, value in content.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_config(kind: type, content: dict, where: Path) -> Any:
    """Builds a config from an object of the file `where`, which errors name.

    Raises:
        ValueError: If a key is unknown or missing, or the config refuses its value.
    """
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} has {shown(content)} where the fields of {kind.__name__} should be"
        )
    try:
        return from_fields(kind, content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_generation(sections: dict, where: Path) -> GenerationDefaults:
    """Returns the checkpoint's settings for generation; without such a section, the defaults."""
    return parse_config(GenerationDefaults, sections.get("generation", {}), where)


def source_sections(
    family: str | None,
    generation: GenerationDefaults,
    special_tokens: dict | None,
    checkpoint_dtype: str | None,
) -> dict[str, Any]:
    """Returns the sections of config.json about the checkpoint that the weights came from.

    Args:
        family: The model_type of transformers.
        generation: The checkpoint's settings for generation.
        special_tokens: The special ids of a tokenizer whose file does not name them.
        checkpoint_dtype: The dtype of the checkpoint's tensors, or None.
    """
    settings = None if generation == GenerationDefaults() else asdict(generation)
    content = {
        "family": family,
        "generation": settings,
        "special_tokens": special_tokens,
        "checkpoint_dtype": checkpoint_dtype,
    }
    return {name: value for name, value in content.items() if value is not None}


def parse_kind(sections: dict, where: Path) -> Any:
    """Builds the config of the model's kind; a file without a kind describes a decoder."""
    return parse_config(KINDS[sections.get("kind", "decoder")], sections["model"], where)


# ---- the checkpoint that the run started from


class Origin(NamedTuple):
    """The checkpoint that a run started from, as the run's config.json names it.

    Attributes:
        path: The path of a run or a folder.
        digest: The digest of its weights.
        family: The model_type of transformers that they came from.
        special_tokens: The special ids of a tokenizer whose file does not name them.
        generation: The checkpoint's settings for generation.
        checkpoint_dtype: The dtype of its tensors, or None.
    """

    path: Path
    digest: str = ""
    family: str | None = None
    special_tokens: dict | None = None
    generation: GenerationDefaults = GenerationDefaults()
    checkpoint_dtype: str | None = None

    def sections(self) -> dict:
        """Returns the sections of config.json that `read_origin` reads."""
        about = source_sections(
            self.family, self.generation, self.special_tokens, self.checkpoint_dtype
        )
        return {"from": {"path": str(self.path), "digest": self.digest}, **about}


def read_origin(sections: dict, where: Path) -> Origin | None:
    """Returns the origin that config.json names; None if the run started with fresh weights.

    Args:
        sections: The sections of config.json.
        where: The path of config.json, for error messages.

    Raises:
        ValueError: If the section "from" holds anything but a path and a digest.
    """
    if "from" not in sections:
        return None
    base = sections["from"]
    if base.keys() != {"path", "digest"}:
        raise ValueError(f"{where}: from is {shown(base)}; it must have a path and a digest")
    about = sections.get("family"), sections.get("special_tokens")
    generation, dtype = parse_generation(sections, where), sections.get("checkpoint_dtype")
    return Origin(Path(base["path"]), base["digest"], *about, generation, dtype)


def keep(run: Path, copy: Path, step: int) -> None:
    """Copies a run, as of the checkpoint at `step`, into the folder `copy`.

    The copy can be loaded after the run has continued and has other weights. On the same disk files
    are hard-linked, so they take no space.

    Raises:
        ValueError: If the checkpoint at `step` no longer exists.
    """
    shutil.rmtree(copy, ignore_errors=True)  # incomplete copy of a killed process
    copy.mkdir()

    def later(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != run / "checkpoints":
            return []
        return [name for name in names if not name.isdecimal() or int(name) > step]

    for name in ("config.json", "tokenizer.json", *NAMES, "checkpoints", "base"):
        source = run / name
        if source.is_dir():
            shutil.copytree(source, copy / name, copy_function=_link, ignore=later)
        elif source.exists():
            _link(source, copy / name)
    if not (copy / "checkpoints" / str(step)).is_dir():
        raise ValueError(
            f"{run} has gone on from step {step} during the copy, and deleted that checkpoint; "
            "start again"
        )


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
