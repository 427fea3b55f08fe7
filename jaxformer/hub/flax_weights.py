"""Reader of weights that a Flax class of transformers saved.

transformers 5 removed its Flax classes. The Flax classes of earlier versions stored a model as a
tree of arrays in Flax's MessagePack format. This module reads files of Flax classes and gives each
array the name and the layout that the PyTorch class of the same model has. The tables in
`jaxformer.hub.families` therefore apply to files of Flax and of PyTorch. Nothing is unpickled.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict

from jaxformer.artifacts.tensors import (
    DTYPES,
    INDEX,
    SINGLE,
    Tensor,
    file_metadata,
    file_tensors,
    indexed_tensors,
)

WEIGHTS, WEIGHTS_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
# The families of `jaxformer.hub.families` for which transformers had Flax classes. Flax weights of
# other families raise an error, because no class defines the layout of their arrays.
MODEL_TYPES = """gpt2 llama mistral gemma bert roberta xlm-roberta distilbert t5 mt5 bart marian
    pegasus""".split()

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
_FORMATS = {dtype: name for name, dtype in DTYPES.items()}


class FlaxTensor(NamedTuple):
    """An array of a Flax tree, with the methods `check`, `equals` and `mapped` of a `Tensor`.

    Attributes:
        name: The array's path in the tree, such as "transformer/h/0/attn/c_attn/kernel".
        path: The file.
        array: The array, in the layout of the file.
        is_transposed: Whether the PyTorch tensor is the transpose of `array`.
    """

    name: str
    path: Path
    array: np.ndarray
    is_transposed: bool = False

    @property
    def dtype(self) -> str:
        """The safetensors name of the dtype."""
        return _FORMATS[str(self.array.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the PyTorch tensor."""
        return self.mapped().shape

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the shape of the PyTorch tensor is `shape`.

        The message gives both shapes in the layout of the file.
        """
        if self.shape != shape:
            expected = shape[::-1] if self.is_transposed else shape
            raise ValueError(
                f"{self.path}: tensor {self.name} is {self.array.shape}; config.json requires "
                f"{expected}"
            )

    def equals(self, other: "Tensor | FlaxTensor") -> bool:
        """Returns whether `other` has the same shape and values."""
        return self.shape == other.shape and np.array_equal(self.mapped(), other.mapped())

    def mapped(self) -> np.ndarray:
        """Returns the values in PyTorch's layout, as a view of the array."""
        return self.array.T if self.is_transposed else self.array


def flax_file(folder: Path) -> Path | None:
    """Returns the path of the Flax weights in a folder, or of their index file.

    Returns None if the folder has PyTorch weights as safetensors or no Flax weights.
    """
    if (folder / INDEX).is_file():
        return None
    if (single := folder / SINGLE).is_file():
        return single if file_metadata(single).get("format") == "flax" else None
    files = (folder / WEIGHTS, folder / WEIGHTS_INDEX)
    return next((file for file in files if file.is_file()), None)


def flax_tensors(folder: Path, model_type: str) -> dict[str, FlaxTensor] | None:
    """Returns the tensors of a Flax checkpoint by their PyTorch names.

    Args:
        folder: A folder in Hugging Face's format.
        model_type: The model_type of its config.json.

    Returns:
        The tensors, or None if `flax_file` returns None.

    Raises:
        ValueError: A file is not a tree of float arrays, or transformers had no Flax class
            for `model_type`.
    """
    file = flax_file(folder)
    if file is None:
        return None
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{file} has Flax weights, but transformers had no Flax class for model_type "
            f"{model_type!r}; Flax weights are read for {', '.join(MODEL_TYPES)}"
        )
    if file.name == SINGLE:
        arrays = {name.replace(".", "/"): x for name, x in _safetensors(file).items()}
    elif file.name == WEIGHTS:
        arrays = read_tree(file)
    else:
        arrays = indexed_tensors(file, ".msgpack", read_tree)
    return rename_tensors(file, arrays)


def _safetensors(file: Path) -> dict[str, FlaxTensor]:
    """Returns the arrays of a safetensors file, as memory maps."""
    tensors = file_tensors(file)
    for tensor in tensors.values():
        tensor.check(tensor.shape)  # `check` raises ValueError unless the dtype is a float.
    return {name: FlaxTensor(name, file, x.mapped()) for name, x in tensors.items()}


def rename_tensors(file: Path, arrays: Mapping[str, FlaxTensor]) -> dict[str, FlaxTensor]:
    """Returns the arrays of a Flax tree with the names and layouts of the PyTorch class.

    In most classes, the Flax kernel is [inputs, outputs], and the PyTorch weight is [outputs,
    inputs]. In GPT-2, the Flax kernel is [outputs, inputs], and the PyTorch weight is [inputs,
    outputs]. Every kernel is therefore transposed.

    Args:
        file: The file, for error messages.
        arrays: The arrays by their paths, with "/" between the keys.

    Raises:
        ValueError: Two arrays get the same name.
    """
    tensors: dict[str, FlaxTensor] = {}
    for path, array in arrays.items():
        *modules, leaf = path.split("/")
        name = ".".join([*modules, _LEAVES.get(leaf, leaf)])
        if name in tensors:
            raise ValueError(f"{file}: {tensors[name].name} and {path} are the same tensor, {name}")
        tensors[name] = array._replace(is_transposed=leaf == "kernel")
    return tensors


def read_tree(path: Path) -> dict[str, FlaxTensor]:
    """Returns the arrays of a MessagePack file of Flax by their paths.

    Raises:
        ValueError: The file is damaged, or does not consist of float arrays in nested maps.
    """
    try:
        leaves = flatten_dict(msgpack_restore(path.read_bytes()))
        arrays = [("/".join(keys), x) for keys, x in leaves.items()]
    except Exception as error:  # A damaged file can raise any type of error.
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a tree of arrays ({fault})") from None
    tensors: dict[str, FlaxTensor] = {}
    for name, x in arrays:
        if not isinstance(x, np.ndarray):
            raise ValueError(f"{path}: {name} is of type {type(x).__name__}; it must be an array")
        if str(x.dtype) not in _FORMATS:
            accepted = ", ".join(_FORMATS)
            raise ValueError(f"{path}: {name} has dtype {x.dtype}; it must be one of {accepted}")
        if name in tensors:  # The keys ("a/b",) and ("a", "b") give equal paths.
            raise ValueError(f"{path} has two arrays with the path {name}")
        tensors[name] = FlaxTensor(name, path, x)
    if not tensors:
        raise ValueError(f"{path} has no arrays")
    return tensors
