"""Folders of tensors: safetensors in one file or in several, and small JSON files beside them.

Nothing is unpickled. Every error is a ValueError that names the file and what is wrong in it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = {"config.json": 2**20, _INDEX: 2**26, "generation_config.json": 2**20}
_PICKLES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
_LARGEST_FILE = 4 * 2**30  # bytes of tensors in a file that is written
DTYPES = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict:
    """The object in a small JSON file, in which no key comes twice."""
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    size, most = path.stat().st_size, _MOST_BYTES.get(path.name, 2**26)
    if size > most:
        raise ValueError(f"{path} has {size} bytes; at most {most} are read")

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; it must be an object")
    return found


def _once(pairs):
    """The object of these pairs, in which no key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _names(path: Path) -> list[str]:
    """The tensors of a safetensors file. The format's reader would take the last of two of the same
    name, so its header is looked at here once."""
    with opened(path) as file:
        names = list(file.keys())
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    try:
        json.loads(header, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return names


def tensor_files(folder: Path) -> dict[str, Path]:
    """{name of a tensor: the file that holds it}, of one file or by the index of several."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_names(folder / _SINGLE), folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        if pickles:
            raise ValueError(
                f"{folder / pickles[0]} is not read: such a file can run code or needs another "
                "library. Convert it once: in Python, with transformers, "
                "AutoModel….from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map is missing or no object")
    files = {place: _shard(index, place) for place in set(map(str, places.values()))}
    for place, path in files.items():
        inside = set(_names(path))
        named = {name for name, other in places.items() if str(other) == place}
        if inside != named:
            name = min(inside ^ named)
            there = "is in the file" if name in inside else "is not in the file"
            raise ValueError(f"{index}: {name} {there} {place}, against the index")
    return {name: files[str(place)] for name, place in places.items()}


def _shard(index: Path, place: str) -> Path:
    """The file of that name in the index's own folder."""
    path = index.parent / place
    is_name = Path(place).name == place and place.endswith(".safetensors") and "\0" not in place
    if not is_name or not _stays(path, index.parent):
        raise ValueError(f"{index}: {place!r} is not the name of a file in this folder")
    if not path.is_file():
        raise ValueError(f"{index}: {place} is not there")
    return path


def _stays(path: Path, folder: Path) -> bool:
    """Whether a path leads to a file of this folder. A downloaded one is links into a store of
    blobs beside it, which the hub's own library made: those stay in its cache."""
    target, home = path.resolve(), folder.resolve()
    if target.parent == home:
        return True
    cache = home.parent.parent  # …/models--NAME/snapshots/REVISION
    return home.parent.name == "snapshots" and target.parent == cache / "blobs"


@contextmanager
def opened(path: Path) -> Iterator:
    """A safetensors file, by the format's own reader."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def require_new(path: Path) -> Path:
    """The path, absolute; ValueError if there is something already, or no folder to make it in."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} holds something already; name a folder that does not exist yet")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder, so {path.name} cannot be made in it")
    return path.absolute()


@contextmanager
def new_folder(path) -> Iterator[Path]:
    """A folder to write into, which is there under its name once all of it is written, or not at
    all. ValueError if there is something already."""
    path = require_new(Path(path))
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        if path.exists():
            path.rmdir()  # it is empty
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tensors(folder: Path, tensors: dict[str, Callable], sizes: dict[str, int]) -> None:
    """model.safetensors, or several of at most 4 GiB with their index.

    tensors: by name, a function that makes each, so that those of one file alone are in memory;
    sizes: their bytes.
    """
    from safetensors.numpy import save_file

    groups, room = [], 0
    for name in tensors:
        if not groups or sizes[name] > room:
            groups.append([])
            room = _LARGEST_FILE
        groups[-1].append(name)
        room -= sizes[name]
    places = {}
    for number, names in enumerate(groups, 1):
        shard = f"model-{number:05}-of-{len(groups):05}.safetensors"
        file = _SINGLE if len(groups) == 1 else shard
        made = {name: np.ascontiguousarray(tensors[name]()) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / _INDEX, {"metadata": total, "weight_map": places})


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
