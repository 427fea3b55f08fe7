"""Reader of weights in MXFP4: 4-bit numbers with a common scale for each block of 32.

Two tensors of bytes contain one matrix per expert:

- NAME_blocks [experts, outputs, inputs / 32, 16] has two numbers per byte. A number is 0, 0.5, 1,
  1.5, 2, 3, 4 or 6 with a sign.
- NAME_scales [experts, outputs, inputs / 32] has one scale per block. The numbers of the block are
  multiplied by 2^(scale − 127).

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
# For each byte, the numbers that its lower and its upper four bits encode, multiplied by 2.
# `decode` halves the scales, because the largest scale, 2^128, exceeds float32.
_TWICE = 2 * np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=-1)


def decode(
    blocks: UInt8[np.ndarray, "*batch outputs groups bytes"],
    scales: UInt8[np.ndarray, "*batch outputs groups"],
) -> Float[np.ndarray, "*batch inputs outputs"]:
    """Decodes MXFP4 numbers to float32, without rounding.

    Args:
        blocks: bytes, each with two numbers, which belong to adjacent inputs of the same output.
        scales: the exponents of the scales, plus 127.
    """
    halves = np.ldexp(np.float32(1.0), scales.astype(np.int32) - 128)
    # Each table entry is read as one 8-byte value, because this takes 0.05 s for 33 million
    # numbers. Reading each entry as two floats would take 0.24 s.
    numbers = np.take(_TWICE.view(np.uint64)[:, 0], blocks).view(np.float32)
    with np.errstate(over="ignore"):
        numbers *= halves[..., None]
    return numbers.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


class PackedTensor(NamedTuple):
    """An MXFP4 tensor [experts, inputs, outputs] with the methods `check` and `mapped` of `Tensor`.

    Attributes:
        name: The tensor's name.
        blocks: The tensor of the 4-bit numbers.
        scales: The tensor of the scales.
    """

    name: str
    blocks: Tensor
    scales: Tensor

    @property
    def dtype(self) -> str:
        """The safetensors name of bfloat16, which represents all MXFP4 numbers exactly."""
        return "BF16"

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.blocks.path

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless the shape of the decoded tensor is `shape`."""
        *experts, inputs, outputs = shape
        if inputs % _BLOCK:
            raise ValueError(
                f"{self.path}: tensor {self.name} has blocks of {_BLOCK} inputs, but config.json "
                f"requires {inputs} inputs, which is not a multiple of {_BLOCK}"
            )
        scales = (*experts, outputs, inputs // _BLOCK)
        for tensor, expected in ((self.blocks, (*scales, _BLOCK // 2)), (self.scales, scales)):
            about = f"{tensor.path}: tensor {tensor.name} is"
            if tensor.shape != expected:
                raise ValueError(f"{about} {tensor.shape}; config.json requires {expected}")
            if tensor.dtype != "U8":
                raise ValueError(f"{about} {tensor.dtype}; it must be U8")

    def mapped(self) -> np.ndarray:
        """Returns the decoded tensor in float32."""
        return decode(
            *(
                np.memmap(tensor.path, np.uint8, "r", tensor.start, tensor.shape)
                for tensor in (self.blocks, self.scales)
            )
        )


def join_packed(tensors: Mapping[str, Tensor]) -> dict:
    """Replaces each pair of tensors NAME_blocks and NAME_scales by a `PackedTensor`."""
    names = {name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)}
    names = {name for name in names if name + _SCALES in tensors}
    parts = {name + part for name in names for part in (_BLOCKS, _SCALES)}
    packed = {x: PackedTensor(x, tensors[x + _BLOCKS], tensors[x + _SCALES]) for x in names}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | packed
