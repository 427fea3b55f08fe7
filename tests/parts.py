"""Parts of long lists, so that successive commits check different parts."""

import re
import zlib
from argparse import ArgumentTypeError
from typing import NamedTuple


class Part(NamedTuple):
    """Part `number` of `count` parts, counted from 1."""

    number: int
    count: int

    def has(self, name: str) -> bool:
        """Returns whether this part contains a name. Each name belongs to exactly one part."""
        return zlib.crc32(name.encode()) % self.count == self.number - 1


def part(text: str) -> Part:
    """Reads the value of a flag `--part K/N`."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) > int(found[2]):
        raise ArgumentTypeError(f"{text!r} must be K/N, such as 1/3 for the first third")
    return Part(int(found[1]), int(found[2]))
