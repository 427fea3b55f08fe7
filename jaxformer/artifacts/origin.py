"""What a run began from: the checkpoint whose weights it went on with, or learnt an adapter of."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple


class Origin(NamedTuple):
    """As config.json has it. path: of a run or a folder; digest: of its weights; family: of
    transformers, from which it came; special_tokens: the ids of
    another's tokenizer, which does not say them itself."""

    path: Path
    digest: str = ""
    family: str | None = None
    special_tokens: dict | None = None

    def sections(self) -> dict:
        """The sections of config.json that `read_origin` reads."""
        found = {"from": {"path": str(self.path), "digest": self.digest}}
        if self.family is not None:
            found["family"] = self.family
        if self.special_tokens is not None:
            found["special_tokens"] = self.special_tokens
        return found


def read_origin(sections: dict, where) -> Origin | None:
    """What a config.json says of it; None: the run began with fresh weights."""
    if "from" not in sections:
        return None
    path, digest = (
        sections["from"].get(name) if isinstance(sections["from"], dict) else None
        for name in ("path", "digest")
    )
    if not isinstance(path, str) or not isinstance(digest, str):
        raise ValueError(f"{where}: from is {sections['from']!r}; it must have a path and a digest")
    return Origin(Path(path), digest, sections.get("family"), sections.get("special_tokens"))


def keep(run: Path, copy: Path, step: int) -> None:
    """Put a run, as it was when its newest checkpoint was that of this step, into a folder, from
    which it can be opened when it has gone on and has other weights. Files are linked where the
    disk is the same, and take no room.

    ValueError if that checkpoint is gone.
    """
    shutil.rmtree(copy, ignore_errors=True)  # what a kill left
    copy.mkdir()

    def later(folder, names):
        if Path(folder) != run / "checkpoints":
            return []
        return [name for name in names if not name.isdecimal() or int(name) > step]

    for name in ("config.json", "tokenizer.json", "checkpoints", "base"):
        source = run / name
        if source.is_dir():
            shutil.copytree(source, copy / name, copy_function=_link, ignore=later)
        elif source.exists():
            _link(source, copy / name)
    if not (copy / "checkpoints" / str(step)).is_dir():
        raise ValueError(f"{run} has gone on from step {step} meanwhile; start again")


def _link(source, target) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def digest_of(params) -> str:
    """Hexadecimal digest of parameters: their paths, shapes and, as float32, values."""
    import numpy as np

    from jaxformer.artifacts.saved import flat  # which imports JAX
    from jaxformer.models.placement import to_host

    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(flat(params).items()):
        digest.update(f"{name} {tuple(leaf.shape)}\n".encode())
        digest.update(np.ascontiguousarray(to_host(leaf), np.float32))
    return digest.hexdigest()
