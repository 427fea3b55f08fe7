"""Folders of tensors: safetensors in one file or in several, and small JSON files beside them.

Nothing is unpickled. Every error is a ValueError that names the file and what is wrong in it.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
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
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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


class Tensor(NamedTuple):
    """A tensor in a safetensors file. dtype: one of the format's words; start: its first byte."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def check(self, shape: tuple[int, ...]) -> None:
        """ValueError if it has another shape than config.json asks for, or holds no floats."""
        about = f"{self.path}: tensor {self.name} is"
        if self.shape != shape:
            raise ValueError(f"{about} {self.shape}; by config.json it must be {shape}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{about} {self.dtype}; it must be one of {', '.join(DTYPES)}")

    def equals(self, other: "Tensor") -> bool:
        """Whether it holds the same numbers."""
        return self.shape == other.shape and np.array_equal(self.mapped(), other.mapped())

    def read_into(self, array: np.ndarray) -> None:
        """Put its values there, converted to that dtype."""
        if array.flags.c_contiguous and array.dtype == jnp.dtype(DTYPES[self.dtype]):
            with self.path.open("rb", buffering=0) as file:  # straight to where they stay
                file.seek(self.start)
                _read_all(file, array)
        else:
            array[...] = self.mapped()

    def mapped(self) -> np.ndarray:
        """Its values, in memory only while they are looked at."""
        dtype = jnp.dtype(DTYPES[self.dtype])
        if 0 in self.shape:  # nothing of a file cannot be mapped
            return np.empty(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.start, self.shape)


def _read_all(file, array: np.ndarray) -> None:
    rest = memoryview(array.reshape(-1).view(np.uint8))
    while rest:
        size = file.readinto(rest)  # at most 2 GiB at once
        if not size:
            raise ValueError(f"{file.name} ended while it was read")
        rest = rest[size:]


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. The format's own reader decides whether it is sound; of
    two tensors of one name it would take the last, so the header is read here once more."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size), object_pairs_hook=_once)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return {
        name: Tensor(name, path, x["dtype"], tuple(x["shape"]), 8 + size + x["data_offsets"][0])
        for name, x in header.items()
    }


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by their names, of one file or by the index of several."""
    if (folder / _SINGLE).is_file():
        return _tensors(folder / _SINGLE)
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
    found = {}
    for place, path in files.items():
        inside = _tensors(path)
        found |= inside
        named = {name for name, other in places.items() if str(other) == place}
        if inside.keys() != named:
            name = min(inside.keys() ^ named)
            there = "is in the file" if name in inside else "is not in the file"
            raise ValueError(f"{index}: {name} {there} {place}, against the index")
    return found


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


def empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array to fill, which `jax.device_put` need not copy on a CPU: XLA asks for 64 bytes. To be
    made on the main thread: malloc may keep what another thread frees to itself."""
    dtype = jnp.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def in_threads(make: Callable, items: Iterable, size: Callable[..., int]) -> list:
    """make(item) of each, the largest first: copying waits for memory, and for its pages."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return list(threads.map(make, sorted(items, key=size, reverse=True)))


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
