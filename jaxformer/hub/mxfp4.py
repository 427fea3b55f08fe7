"""Reader of weights in MXFP4: numbers of 4 bits, with one scale for each block of 32.

Two tensors of bytes hold a matrix of each expert: NAME_blocks [experts, outputs, inputs / 32, 16],
of which each byte has two numbers, and NAME_scales [experts, outputs, inputs / 32]. A number has
the value ±0, 0.5, 1, 1.5, 2, 3, 4 or 6, times 2^(scale − 127).

Reference:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxformer.artifacts.tensors import Tensor

_BLOCK, _BLOCKS, _SCALES = 32, "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
# The two numbers of each byte, first that of the lower four bits. Both are doubled, because the
# largest scale, 2^128, exceeds float32.
_TWICE = 2 * np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1)


def decode(
    blocks: UInt8[np.ndarray, "*batch outputs groups bytes"],
    scales: UInt8[np.ndarray, "*batch outputs groups"],
) -> Float[np.ndarray, "*batch inputs outputs"]:
    """Returns the numbers in float32. They have few enough digits for bfloat16, too.

    Args:
        blocks: pairs of numbers, along the inputs of a matrix.
        scales: the exponents of the scales, plus 127.
    """
    halves = np.ldexp(np.float32(1.0), scales.astype(np.int32) - 128)
    # One lookup of 8 bytes for both numbers of a byte took 0.05 s for 33 million numbers. A lookup
    # of two floats took 0.24 s.
    numbers = np.take(_TWICE.view(np.uint64)[:, 0], blocks).view(np.float32)
    with np.errstate(over="ignore"):
        numbers *= halves[..., None]
    return numbers.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


class PackedTensor(NamedTuple):
    """A tensor [experts, inputs, outputs] in MXFP4. Like a `Tensor`, it can be checked and mapped.

    Attributes:
        name: Its name.
        blocks: The numbers.
        scales: Their scales.
    """

    name: str
    blocks: Tensor
    scales: Tensor

    @property
    def dtype(self) -> str:
        """The format's name of the smallest dtype that has the numbers."""
        return "BF16"

    @property
    def path(self) -> Path:
        """The file."""
        return self.blocks.path

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the bytes hold a tensor of this shape."""
        *experts, inputs, outputs = shape
        if inputs % _BLOCK:
            raise ValueError(
                f"{self.path}: tensor {self.name} has blocks of {_BLOCK} inputs; by config.json "
                f"it has {inputs} inputs, which are not whole blocks"
            )
        scales = (*experts, outputs, inputs // _BLOCK)
        for tensor, expected in ((self.blocks, (*scales, _BLOCK // 2)), (self.scales, scales)):
            about = f"{tensor.path}: tensor {tensor.name} is"
            if tensor.shape != expected:
                raise ValueError(f"{about} {tensor.shape}; by config.json it must be {expected}")
            if tensor.dtype != "U8":
                raise ValueError(f"{about} {tensor.dtype}; it must be U8")

    def mapped(self) -> np.ndarray:
        """Returns the values in float32."""
        return decode(
            *(
                np.memmap(tensor.path, np.uint8, "r", tensor.start, tensor.shape)
                for tensor in (self.blocks, self.scales)
            )
        )


def join_packed(tensors: Mapping[str, Tensor]) -> dict:
    """Returns the tensors with one `PackedTensor` for each pair of blocks and scales."""
    names = {name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)}
    names = {name for name in names if name + _SCALES in tensors}
    parts = {name + part for name in names for part in (_BLOCKS, _SCALES)}
    packed = {x: PackedTensor(x, tensors[x + _BLOCKS], tensors[x + _SCALES]) for x in names}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | packed
