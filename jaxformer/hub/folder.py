"""A foreign checkpoint's folder: config.json, and safetensors in one file or in several.

Nothing is unpickled and no code of a checkpoint is run. Every error is a ValueError that names the
file and what is wrong in it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxformer.hub.options import Options

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = {"config.json": 2**20, _INDEX: 2**26, "generation_config.json": 2**20}
_PICKLES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
DTYPES = ("F64", "F32", "F16", "BF16")


def read_json(path: Path) -> dict:
    """The object in a small JSON file, in which no key comes twice."""
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    size, most = path.stat().st_size, _MOST_BYTES.get(path.name, 2**26)
    if size > most:
        raise ValueError(f"{path} has {size} bytes; at most {most} are read")

    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} comes twice")
        return found

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; it must be an object")
    return found


def read_options(folder: Path, tensors=()) -> Options:
    """config.json of the folder that has these tensors."""
    return Options(read_json(folder / "config.json"), folder / "config.json", tensors)


def tensor_files(folder: Path) -> dict[str, Path]:
    """{name of a tensor: the file that holds it}, of one file or by the index of several."""
    if (folder / _SINGLE).is_file():
        with opened(folder / _SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / _SINGLE)
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
        with opened(path) as file:
            inside = set(file.keys())
        named = {name for name, other in places.items() if str(other) == place}
        if inside != named:
            name = min(inside ^ named)
            there = "is in the file" if name in inside else "is not in the file"
            raise ValueError(f"{index}: {name} {there} {place}, against the index")
    return {name: files[str(place)] for name, place in places.items()}


def _shard(index: Path, place: str) -> Path:
    """The file of that name in the index's own folder, whatever links there are."""
    path = index.parent / place
    is_name = Path(place).name == place and place.endswith(".safetensors")
    if not is_name or not path.resolve().parent.samefile(_home(path)):
        raise ValueError(f"{index}: {place!r} is not the name of a file in this folder")
    if not path.is_file():
        raise ValueError(f"{index}: {place} is not there")
    return path


def _home(path: Path) -> Path:
    return path.parent.resolve()


@contextmanager
def opened(path: Path) -> Iterator:
    """A safetensors file, by the format's own reader."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
