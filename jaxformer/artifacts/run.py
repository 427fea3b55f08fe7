"""Run folders: their paths, small files, and the checkpoint that a run started from.

A run folder contains config.json, tokenizer.json, documents.txt, tokens/, checkpoints/,
metrics.jsonl, loss.png, samples.txt and lock. The training process locks the file `lock`.
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

# The version of the format of runs and saved models. Increase the version if the format changes.
RUN_FORMAT = 3
# Types of the sections of config.json of a run or of a saved model. For the type dict,
# `parse_config` checks the fields of the section.
SECTIONS: dict[str, Any] = {
    "format": int,
    "kind": Literal[tuple(KINDS)],  # pyrefly: ignore[invalid-literal] (computed)
    "model": dict,
    "training": dict,
    "objective": dict,  # Only runs of `training.fit` have this section.
    "text": tuple[Path, ...] | None,
    "source": Path | None,
    "target": Path | None,
    "init_from": dict[str, str],
    "model_type": str | None,
    "generation": dict,
    "special_tokens": dict | None,
    "parse_special": bool,
    "checkpoint_dtype": CheckpointDType | None,
    **dict.fromkeys(("mask", "activation", "positions"), dict),
    "layers": list,
}
# In samples.txt, a header precedes each sample. A line of a sample that looks like a header is
# written with an additional leading space.
_HEADER = re.compile(r"(?m)^---- step (\d+)\n")
_LIKE_HEADER = re.compile(r"(?m)^(?= *---- step \d+$)")
_INDENTED = re.compile(r"(?m)^ (?= *---- step \d+$)")


class RunFolder:
    """Paths of a run folder, with methods that read and write its small files.

    If a run trains an adapter, `base` is a copy of the run whose weights the adapter changes.
    """

    def __init__(self, path: str | Path):
        """Computes the paths without reading or creating files.

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
        self.examples = {part: self.tokens / f"{part}.npz" for part in ("train", "held_out")}
        self.reference_scores = {part: self.tokens / f"{part}.scores.npy" for part in self.examples}
        self.references = self.tokens / "references.json"
        self.base = self.path / "base"

    @property
    def holds_run(self) -> bool:
        """Whether the folder contains the config.json of a run."""
        return self.config.exists()

    @property
    def is_free(self) -> bool:
        """Whether a new run may start in this folder.

        The folder must be missing or empty, or its run must have been killed before the run wrote
        config.json.
        """
        if not self.path.exists():
            return True
        left = {path.name for path in self.path.iterdir()}
        ours = (self.lock.name, self.base.name, self.tokenizer.name, *NAMES, f"{self.config.name}.")
        return not left or (self.lock.name in left and all(name.startswith(ours) for name in left))

    def write_config(self, sections: dict) -> None:
        """Writes config.json.

        Args:
            sections: The sections by name; a section is a dataclass or JSON data.
        """
        plain = {name: asdict(x) if is_dataclass(x) else x for name, x in sections.items()}
        write_json(self.config, {"format": RUN_FORMAT, **plain})

    def read_config(self, *needed: str) -> dict:
        """Returns the sections of config.json by name.

        Args:
            *needed: Names of required sections.

        Raises:
            ValueError: The folder has no run, or a section is invalid or missing. The message names
                the section.
        """
        if not self.config.exists():
            raise ValueError(f"{self.path} is not a run (it has no {self.config.name})")
        sections = read_sections(self.path)
        if sections is None:
            raise ValueError(
                f"{self.config} has no format number; jaxformer reads format {RUN_FORMAT}"
            )
        for name in needed:
            if name not in sections:
                raise ValueError(f"{self.config} has no section {name!r}")
        return sections

    def cut_after(self, step: int) -> None:
        """Removes the samples and metrics of all steps after `step`, and incomplete lines."""
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
        """Returns (step, text) of each sample; an incomplete last line is left out."""
        parts = _HEADER.split(_whole_lines(self.samples))
        numbered = zip(parts[1::2], parts[2::2], strict=True)
        return [
            (int(number), _INDENTED.sub("", text.removesuffix("\n")))
            for number, text in numbered
            if text
        ]

    def read_metrics(self) -> list[dict]:
        """Returns a dict for each line of metrics.jsonl.

        Each dict contains `step` and the measurements of that step. Reading stops before the first
        line that is incomplete or not a JSON object.

        An evaluation writes `held_out_loss` (nats per token) and `bits_per_byte`, computed over
        `scored` tokens. All evaluations score the same windows, except the last evaluation of a
        run, which scores the whole held-out text. The line of the last evaluation also gives the
        scores on the windows of the earlier evaluations, as `part_loss`, `part_bits_per_byte` and
        `part_scored`. Values that are not finite are left out; `not_finite` lists their names.
        """
        lines = []
        for line in _whole_lines(self.metrics).split("\n")[:-1]:
            try:
                lines.append(converted("line", parse_json(line), dict[str, Any]))
            except ValueError:
                break
            if type(lines[-1].get("step")) is not int:
                raise ValueError(
                    f"{self.metrics}: in line {len(lines)}, step must be a whole number"
                )
        return lines


def _whole_lines(path: Path) -> str:
    """Returns the complete lines of a file, or "" if the file does not exist.

    A process that was killed while appending may leave an incomplete last line, which may end
    within a character.
    """
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].decode(errors="replace")


def _section(step: int, text: str) -> str:
    """Formats a sample for samples.txt."""
    return f"---- step {step}\n{_LIKE_HEADER.sub(' ', text)}\n"


def read_sections(folder: Path) -> dict | None:
    """Returns the sections of config.json by name, or None if the folder is not jaxformer's.

    Raises:
        ValueError: a section is unknown or invalid, or a link leads out of the folder. The message
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
        raise ValueError(
            f"{path} has format {shown(version)}; this version of jaxformer reads {RUN_FORMAT}"
        )
    if "model" not in content:
        raise ValueError(f"{path} has no section 'model'")
    for name in content:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ValueError(
                f"{path} has the unknown section {shown(name)}; the sections are {known}"
            )
    try:
        return {name: converted(name, value, SECTIONS[name]) for name, value in content.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_config(kind: type, content: dict, where: Path) -> Any:
    """Builds a config from a JSON object of the file `where`.

    Raises:
        ValueError: a key is unknown or missing, or its value is invalid. The message names the
            file.
    """
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} has {shown(content)}; it must have an object with the fields of "
            f"{kind.__name__}"
        )
    try:
        return from_fields(kind, content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_generation(sections: dict, where: Path) -> GenerationDefaults:
    """Returns the settings in the section "generation", or defaults if the section is missing."""
    return parse_config(GenerationDefaults, sections.get("generation", {}), where)


def source_sections(
    model_type: str | None,
    generation: GenerationDefaults,
    special_tokens: dict | None,
    checkpoint_dtype: str | None,
) -> dict[str, Any]:
    """Returns the sections of config.json that describe the imported checkpoint.

    Args:
        model_type: The imported checkpoint's model_type in transformers, or None.
        generation: The checkpoint's settings for generation.
        special_tokens: The ids of the special tokens as a dict, or None if tokenizer.json specifies
            them.
        checkpoint_dtype: The dtype of the checkpoint's tensors, or None.
    """
    settings = None if generation == GenerationDefaults() else asdict(generation)
    content = {
        "model_type": model_type,
        "generation": settings,
        "special_tokens": special_tokens,
        "checkpoint_dtype": checkpoint_dtype,
    }
    return {name: value for name, value in content.items() if value is not None}


def parse_kind(sections: dict, where: Path) -> Any:
    """Builds the model's config; its class follows from `kind`, which defaults to a decoder."""
    return parse_config(KINDS[sections.get("kind", "decoder")], sections["model"], where)


# ---- the checkpoint that the run started from


class Origin(NamedTuple):
    """The checkpoint that a run started from, as described in the run's config.json.

    Attributes:
        path: The path of a run, or of another folder with a model.
        digest: The digest of the checkpoint's weights.
        model_type: The imported checkpoint's model_type in transformers, or None.
        special_tokens: The ids of the special tokens as a dict, or None if tokenizer.json specifies
            them.
        generation: The checkpoint's settings for generation.
        checkpoint_dtype: The dtype of the checkpoint's tensors, or None.
    """

    path: Path
    digest: str = ""
    model_type: str | None = None
    special_tokens: dict | None = None
    generation: GenerationDefaults = GenerationDefaults()
    checkpoint_dtype: str | None = None

    def sections(self) -> dict:
        """Returns the sections of config.json that `read_origin` reads."""
        about = source_sections(
            self.model_type, self.generation, self.special_tokens, self.checkpoint_dtype
        )
        return {"init_from": {"path": str(self.path), "digest": self.digest}, **about}


def read_origin(sections: dict, where: Path) -> Origin | None:
    """Returns the origin of a run, or None if the run started with random weights.

    Args:
        sections: The sections of config.json.
        where: The path of config.json, for error messages.

    Raises:
        ValueError: The section "init_from" is not an object with a path and a digest.
    """
    if "init_from" not in sections:
        return None
    base = sections["init_from"]
    if base.keys() != {"path", "digest"}:
        raise ValueError(
            f"{where}: init_from is {shown(base)}; it must be an object with a path and a digest"
        )
    about = sections.get("model_type"), sections.get("special_tokens")
    generation, dtype = parse_generation(sections, where), sections.get("checkpoint_dtype")
    return Origin(Path(base["path"]), base["digest"], *about, generation, dtype)


def keep(run: Path, copy: Path, step: int) -> None:
    """Copies the checkpoint at `step`, and the files needed to load it, into the folder `copy`.

    The copy remains loadable even if `run` continues training. If both folders are on one disk,
    files are hard-linked and take no additional space.

    Raises:
        ValueError: The checkpoint at `step` no longer exists.
    """
    # A killed process may have left an incomplete copy.
    shutil.rmtree(copy, ignore_errors=True)
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
            f"{run} continued training and deleted the checkpoint of step {step} during the copy; "
            "start again"
        )


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
