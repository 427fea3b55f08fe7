"""Check that no symbolic link in an untrusted folder leads out of it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_WANDB = "wandb"  # Weights & Biases puts links to its cache there; we read nothing in it


def check_links(folder: Path, *, whole_tree: bool) -> None:
    """Checks that no link in the folder leads out of it.

    Reading such a link could show a file that the folder's author has no access to, and appending
    to it would change that file. The folder itself may be a link. A snapshot in the cache of
    huggingface_hub consists of links to the `blobs` folder of the same repository, which are
    allowed.

    Args:
        folder: A run, a saved folder or a folder in Hugging Face's format.
        whole_tree: Whether to check subfolders too. If False, only the entries of the folder itself
            are checked, where all the files of a model are.

    Raises:
        ValueError: If a link leads out of the folder. The message names the link and its target.
    """
    for entry in _entries(folder, whole_tree):
        if entry.is_symlink() and not stays(Path(entry.path), folder):
            raise ValueError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, outside {folder}; put the "
                "file itself there"
            )


def stays(path: Path, folder: Path) -> bool:
    """Returns whether `path`, below `folder`, resolves to something that belongs to `folder`."""
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return False
    if target.is_relative_to(home):
        return target.relative_to(home).parts[:1] != (_WANDB,)
    snapshots, repository = home.parent, home.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    is_snapshot = snapshots.name == "snapshots" and repository.name.startswith("models--")
    return is_snapshot and target.parent == repository / "blobs"


def _entries(folder: Path, whole_tree: bool) -> Iterator[os.DirEntry]:
    """Yields the entries of a folder and, for a whole tree, of the folders in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == _WANDB and not entry.is_symlink():
                continue
            yield entry
            if whole_tree and entry.is_dir(follow_symlinks=False):
                # A run that is training renames the folder of a checkpoint once it is complete.
                with suppress(FileNotFoundError):
                    yield from _entries(Path(entry.path), whole_tree)
