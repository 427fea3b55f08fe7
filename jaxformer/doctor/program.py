"""Communication of a compiled program between devices, and its copies of an array."""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

from jaxformer.doctor.hlo import Instruction, walk

COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
COLLECTIVE_KINDS += ("collective-permute", "collective-broadcast")


class Collective(NamedTuple):
    """Exchange between the devices of a group.

    Attributes:
        kind: One of `COLLECTIVE_KINDS`.
        size: Bytes of the whole arrays: the output of a gather, the input of a scatter.
        devices: The number of devices in a group.
        times: How often the program runs it.
    """

    kind: str
    size: int
    devices: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends, and receives, over all runs.

        In a ring of n devices this is size · (n − 1)/n per run. It is twice that for an all-reduce,
        which is a scatter and a gather. In a permutation or a broadcast, a device sends the whole
        array.
        """
        if self.kind.startswith("collective-"):
            return float(self.times * self.size)
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * self.size * rounds * (self.devices - 1) / self.devices


def collectives(text: str) -> list[Collective]:
    """Returns the exchanges between the devices of a program.

    A TPU program may split one exchange into several instructions of one channel, between other
    work. They count as one exchange, with the count of the instruction that runs least often.

    Raises:
        ValueError: It is not known how often an exchange runs.
    """
    devices = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    everyone = int(devices[1]) if devices else 1
    runs: dict[str, Counter[tuple[Instruction, str, int]]] = {}
    for instruction, computation, times in walk(text):
        kind = instruction.operation.removesuffix("-start")
        if kind in COLLECTIVE_KINDS and (group := _group(instruction.rest, everyone)) > 1:
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # on TPU, a fusion that keeps a part of the sum per device
            channel = re.search(r"channel_id=\d+", instruction.rest)
            if times is None:
                raise ValueError(
                    f"the program does not show how often it runs {instruction.name}: the trip "
                    "count of a loop is unknown"
                )
            pieces = runs.setdefault(channel[0] if channel else instruction.name, Counter())
            pieces[instruction, kind, group] += times
    return [
        _collective(*piece, times)
        for pieces in runs.values()
        for piece, times in _of_one_exchange(pieces)
    ]


def _of_one_exchange(
    pieces: Counter[tuple[Instruction, str, int]],
) -> list[tuple[tuple[Instruction, str, int], int]]:
    """Returns the piece that runs least often, or all pieces if they are exchanges of their own.

    JAX gives the collectives of `shard_map` one channel, whatever their kind.
    """
    kinds = {kind for _, kind, _ in pieces}
    return list(pieces.items()) if len(kinds) > 1 else [min(pieces.items(), key=lambda x: x[1])]


def _collective(instruction: Instruction, kind: str, group: int, times: int) -> Collective:
    arrays = instruction.arrays
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        # Without the synchronization flags of TPUs, half are operands and the other half results.
        arrays = [x for x in arrays if (x.dtype, x.num_bytes) != ("u32", 4)]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(x.num_bytes for x in arrays)
    is_scattered = kind == "reduce-scatter" and instruction.operation != "all-reduce"
    return Collective(kind, size * group if is_scattered else size, group, times)


def _group(rest: str, everyone: int) -> int:
    """Returns the number of devices in a group.

    The text gives groups as lists of devices, as [groups, devices], or as axes of a mesh.
    """
    if "source_target_pairs={}" in rest:
        return 1
    if "source_target_pairs=" in rest:
        return 2
    if axes := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes[2])
        return prod(int(part or sizes[name]) for name, part in parts)
    if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(shape[1])
    if members := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(members[1].split(","))
    if "replica_groups={}" in rest or "replica_groups=" not in rest:
        return everyone
    raise ValueError(f"the groups of devices cannot be read: {rest}")


class Total(NamedTuple):
    """Sums over the collectives of one kind: the runs, and the bytes that one device sends."""

    count: int
    sent: float


def by_kind(found: list[Collective]) -> dict[str, Total]:
    """Returns the sums of each kind of collective that occurs."""
    groups = {kind: [one for one in found if one.kind == kind] for kind in COLLECTIVE_KINDS}
    return {
        kind: Total(sum(one.times for one in group), sum(one.sent for one in group))
        for kind, group in groups.items()
        if group
    }


def copies(text: str, shape: tuple[int, ...]) -> int:
    """Counts the copies of arrays of a shape in a program.

    The order of the axes and axes of size 1 are ignored. A move between two kinds of memory of a
    device is not a copy.

    Args:
        text: The text of the program.
        shape: The shape of the array.
    """
    return sum(
        times or 1
        for instruction, _, times in walk(text)
        if instruction.operation in ("copy", "copy-start")
        and any(_without_ones(x.sizes) == _without_ones(shape) for x in instruction.arrays)
        and not _changes_memory(instruction)
    )


def _without_ones(sizes: tuple[int, ...]) -> list[int]:
    return sorted(n for n in sizes if n != 1)


def _changes_memory(copy: Instruction) -> bool:
    """Returns whether a copy moves an array between two kinds of memory."""
    return copy.operation == "copy-start" and len({x.space for x in copy.arrays[:2]}) > 1
