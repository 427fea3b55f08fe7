"""Folders of tensors: safetensors in one file, or in several with an index.

`flat` names the arrays of a tree of parameters, as in the files.

Nothing is unpickled. Every error is a ValueError that names the file and the fault.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.artifacts.files import parse_json, read_json, stays, write_json
from jaxformer.models.mesh import to_host

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = "pytorch_model.bin pytorch_model.bin.index.json tf_model.h5 flax_model.msgpack".split()
_LARGEST_FILE = 4 * 2**30  # bytes of tensors per written file
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Tensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        name: Its name.
        path: The file.
        dtype: The format's name of its dtype.
        shape: Its shape.
        start: Offset of its first byte.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the shape is not the expected one, or the dtype no float."""
        about = f"{self.path}: tensor {self.name} is"
        if self.shape != shape:
            raise ValueError(f"{about} {self.shape}; by config.json it must be {shape}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{about} {self.dtype}; it must be one of {', '.join(DTYPES)}")

    def equals(self, other: "Tensor") -> bool:
        """Returns whether `other` holds the same numbers."""
        return self.shape == other.shape and np.array_equal(self.mapped(), other.mapped())

    def read_into(self, array: np.ndarray) -> None:
        """Copies the values into `array`, converted to its dtype."""
        if array.flags.c_contiguous and array.dtype == jnp.dtype(DTYPES[self.dtype]):
            with self.path.open("rb", buffering=0) as file:  # directly into the final memory
                file.seek(self.start)
                _read_all(file, array)
        else:
            array[...] = self.mapped()

    def mapped(self) -> np.ndarray:
        """Returns the values as a memory map, which reads a page when it is accessed."""
        dtype = jnp.dtype(DTYPES[self.dtype])
        if 0 in self.shape:  # an empty range of a file cannot be mapped
            return np.empty(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.start, self.shape)


def flat(tree: dict) -> dict:
    """Returns the leaves by their paths, such as "blocks/attention/query/kernel"."""
    return flatten_dict(tree, sep="/")


def flat_shapes(tree: dict) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a tree's leaves by their paths."""
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def filled(tree: dict, leaves: dict) -> dict:
    """Returns the tree with the leaves of `leaves`, which are by path: the inverse of `flat`."""
    return unflatten_dict(flatten_dict(tree, keep_empty_nodes=True, sep="/") | leaves, sep="/")


def digest_of(params: dict) -> str:
    """Returns the hexadecimal digest of parameters: paths, shapes and values as float32."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(flat(params).items()):
        digest.update(f"{name} {tuple(leaf.shape)}\n".encode())
        digest.update(np.ascontiguousarray(to_host(leaf), np.float32).data)
    return digest.hexdigest()


def _read_all(file: FileIO, array: np.ndarray) -> None:
    rest = array.reshape(-1).view(np.uint8).data
    while rest:
        size = file.readinto(rest)  # at most 2 GiB at once
        if not size:
            raise ValueError(f"{file.name} is shorter than its header says")
        rest = rest[size:]


def file_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by their names.

    The format's own reader checks the file. It would accept two tensors of one name and use the
    last, so this function parses the header once more.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return {
        name: Tensor(name, path, x["dtype"], tuple(x["shape"]), 8 + size + x["data_offsets"][0])
        for name, x in header.items()
    }


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by their names, from one file or from several by an index."""
    if (folder / _SINGLE).is_file():
        return file_tensors(folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        if pickles := [name for name in _PICKLES if (folder / name).exists()]:
            raise ValueError(
                f"{folder / pickles[0]} is not read: such a file can run code or needs another "
                "library. Convert it once: in Python, with transformers, "
                "AutoModel….from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map must be an object that is not empty")
    files = {place: _shard(index, place) for place in set(map(str, places.values()))}
    tensors = {}
    for place, path in files.items():
        shard = file_tensors(path)
        tensors |= shard
        listed = {name for name, other in places.items() if str(other) == place}
        if different := shard.keys() ^ listed:
            name = min(different)
            there = "is in the file" if name in shard else "is not in the file"
            raise ValueError(f"{index}: {name} {there} {place}, against the index")
    return tensors


def _shard(index: Path, place: str) -> Path:
    """Returns the path of a file in the index's folder; raises ValueError for any other path."""
    path = index.parent / place
    is_name = Path(place).name == place and place.endswith(".safetensors") and "\0" not in place
    if not is_name or not stays(path, index.parent):
        raise ValueError(f"{index}: {place!r} is not the name of a file in this folder")
    if not path.is_file():
        raise ValueError(f"{index}: {place} does not exist")
    return path


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an uninitialized array that `jax.device_put` need not copy on a CPU.

    XLA requires an alignment of 64 bytes. Call this on the main thread: malloc may reserve memory
    that another thread frees for that thread.
    """
    numpy_dtype = jnp.dtype(dtype)
    size = math.prod(shape) * numpy_dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(numpy_dtype).reshape(shape)


def in_threads(make: Callable, items: Iterable, size: Callable[..., int]) -> list:
    """Calls `make` on each item, in threads, the largest item first.

    Threads help because copying waits for memory and page faults.
    """
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return list(threads.map(make, sorted(items, key=size, reverse=True)))


def write_tensors(folder: Path, tensors: dict[str, Callable], sizes: dict[str, int]) -> None:
    """Writes model.safetensors, or several files of at most 4 GiB with their index.

    Args:
        folder: The folder.
        tensors: Functions that create the tensors, by name. Only the tensors of one file are in
            memory at a time.
        sizes: The tensors' sizes in bytes.
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
