"""Readers and writers of safetensors files, single or sharded with an index.

`flat` converts a tree to a dict from paths to arrays. In jaxformer's files, the paths are the names
of the tensors. Pickle files are never opened. Every error is a ValueError that gives the file and
the fault.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.artifacts.files import parse_json, read_json, stays, write_json
from jaxformer.models.sharding.parameters import to_host

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = "pytorch_model.bin pytorch_model.bin.index.json tf_model.h5".split()
# The maximum number of bytes of the tensors in one written file.
_LARGEST_FILE = 4 * 2**30
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
StoredTensor = TypeVar("StoredTensor")


class Tensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        name: The tensor's name.
        path: The path of the file.
        dtype: The dtype, as named in the safetensors format.
        shape: The shape.
        start: The offset of the tensor's first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the shape differs from `shape` or the dtype is not a float dtype."""
        about = f"{self.path}: tensor {self.name} is"
        if self.shape != shape:
            raise ValueError(f"{about} {self.shape}; config.json requires {shape}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{about} {self.dtype}; it must be one of {', '.join(DTYPES)}")

    def equals(self, other: "Tensor") -> bool:
        """Returns whether the tensor and `other` have equal shapes and values."""
        return self.shape == other.shape and np.array_equal(self.mapped(), other.mapped())

    def read_into(self, array: np.ndarray) -> None:
        """Copies the values into `array`, converted to its dtype."""
        if array.flags.c_contiguous and array.dtype == jnp.dtype(DTYPES[self.dtype]):
            # An unbuffered file is read into the array without an intermediate copy.
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start)
                _read_all(file, array)
        else:
            array[...] = self.mapped()

    def mapped(self) -> np.ndarray:
        """Returns the values as a memory-mapped array, which loads pages on access."""
        dtype = jnp.dtype(DTYPES[self.dtype])
        if 0 in self.shape:  # NumPy cannot map an empty range of a file.
            return np.empty(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.start, self.shape)


def flat(tree: dict) -> dict:
    """Flattens a tree to a dict with path keys, such as "blocks/attention/query/kernel"."""
    return flatten_dict(tree, sep="/")


def flat_shapes(tree: dict) -> dict[str, tuple[int, ...]]:
    """Returns a dict from the path of each leaf to its shape."""
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def filled(tree: dict, leaves: dict) -> dict:
    """Rebuilds a tree from a dict of leaves by path: the inverse of `flat`."""
    return unflatten_dict(flatten_dict(tree, keep_empty_nodes=True, sep="/") | leaves, sep="/")


def compute_digest(params: dict) -> str:
    """Computes a hexadecimal digest of the parameters' paths, shapes and float32 values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(flat(params).items()):
        digest.update(f"{name} {tuple(leaf.shape)}\n".encode())
        digest.update(np.ascontiguousarray(to_host(leaf), np.float32).data)
    return digest.hexdigest()


def _read_all(file: FileIO, array: np.ndarray) -> None:
    rest = array.reshape(-1).view(np.uint8).data
    while rest:
        size = file.readinto(rest)  # Linux reads at most 2 GiB per call.
        if not size:
            raise ValueError(f"{file.name} is shorter than its header specifies")
        rest = rest[size:]


def file_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name.

    The safetensors library checks the file, but accepts a repeated name and uses the last tensor.
    Therefore `file_tensors` also parses the header itself and rejects repeated names.
    """
    header, start = _read_header(path)
    header.pop("__metadata__", None)
    return {
        name: Tensor(name, path, x["dtype"], tuple(x["shape"]), start + x["data_offsets"][0])
        for name, x in header.items()
    }


def file_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a safetensors file."""
    return _read_header(path)[0].get("__metadata__") or {}


def _read_header(path: Path) -> tuple[dict, int]:
    """Returns the header of a safetensors file and the offset of the first tensor's first byte."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return parse_json(file.read(size)), 8 + size
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by name, from a single file or from sharded files."""
    if (folder / SINGLE).is_file():
        return file_tensors(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        if pickles := [name for name in _PICKLES if (folder / name).exists()]:
            raise ValueError(
                f"{folder / pickles[0]} cannot be read: files of this format can run code or need "
                "another library. Convert it once: in Python, with transformers, "
                "AutoModel….from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")
    return indexed_tensors(index, ".safetensors", file_tensors)


def indexed_tensors(
    index: Path, suffix: str, read: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Returns the tensors of several files by their names.

    Args:
        index: The JSON file whose weight_map maps each tensor to its file.
        suffix: The required suffix of the file names, such as ".safetensors".
        read: Returns the tensors of one file by their names.

    Raises:
        ValueError: The index and the files disagree, or a file is outside the index's folder.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map must be a nonempty object")
    files = {place: _shard(index, place, suffix) for place in set(map(str, places.values()))}
    tensors: dict[str, StoredTensor] = {}
    for place, path in files.items():
        shard = read(path)
        tensors |= shard
        listed = {name for name, other in places.items() if str(other) == place}
        if different := shard.keys() ^ listed:
            name = min(different)
            there = "must be listed for" if name in shard else "must not be listed for"
            raise ValueError(f"{index}: this index is wrong: {name} {there} the file {place}")
    return tensors


def _shard(index: Path, place: str, suffix: str) -> Path:
    """Returns the path of a shard; raises ValueError if it is not in the folder of the index."""
    path = index.parent / place
    is_name = Path(place).name == place and place.endswith(suffix) and "\0" not in place
    if not is_name or not stays(path, index.parent):
        raise ValueError(f"{index}: {place!r} must be the name of a file in this folder")
    if not path.is_file():
        raise ValueError(f"{index}: {place} does not exist")
    return path


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an uninitialized array that `jax.device_put` uses without a copy on a CPU.

    XLA requires an alignment of 64 bytes. Call this function on the main thread. If another thread
    allocates and frees the array, malloc may reserve the freed memory for that thread.
    """
    numpy_dtype = jnp.dtype(dtype)
    size = math.prod(shape) * numpy_dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(numpy_dtype).reshape(shape)


def place_array(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Places an array, which is equal in all processes, on the devices of a sharding.

    With several processes, `jax.device_put` compares the arrays of all processes one by one. The
    threads of `in_threads` would place them in a different order in each process, so the comparison
    would fail. This function needs no communication.

    Args:
        array: The array.
        sharding: The sharding; JAX's first device if None.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def in_threads(make: Callable, items: Iterable, size: Callable[..., int]) -> list:
    """Calls `make` on each item in a thread pool, starting with the largest items.

    Threads speed up the copying of tensors, which mostly waits for memory and page faults.
    """
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return list(threads.map(make, sorted(items, key=size, reverse=True)))


def write_tensors(folder: Path, tensors: dict[str, Callable], sizes: dict[str, int]) -> None:
    """Writes model.safetensors, or several files of at most 4 GiB and an index.

    Args:
        folder: The folder.
        tensors: Functions that create the tensors, by name. Only the tensors of one file are in
            memory at a time.
        sizes: The sizes of the tensors in bytes, by name.
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
        file = SINGLE if len(groups) == 1 else shard
        made = {name: np.ascontiguousarray(tensors[name]()) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": places})
