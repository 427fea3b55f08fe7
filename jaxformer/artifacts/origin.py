"""The checkpoint that a run started from: for fine-tuning, or as the base of an adapter."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from jaxformer.artifacts.run import parse_generation, source_sections
from jaxformer.artifacts.tokenizer_files import NAMES
from jaxformer.models.config.check import shown
from jaxformer.models.config.generation import GenerationDefaults


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


def digest_of(params: dict) -> str:
    """Returns the hexadecimal digest of parameters: paths, shapes and values as float32."""
    import numpy as np

    from jaxformer.artifacts.tensors import flat  # which imports JAX
    from jaxformer.models.mesh import to_host

    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(flat(params).items()):
        digest.update(f"{name} {tuple(leaf.shape)}\n".encode())
        digest.update(np.ascontiguousarray(to_host(leaf), np.float32).data)
    return digest.hexdigest()
