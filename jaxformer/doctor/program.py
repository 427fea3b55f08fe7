"""Parses a compiled program: instructions, exchanges between devices, and copies.

The parser reads the text of the program, `Compiled.as_text()`, because JAX has no other interface
to this information. `cost_analysis()` and `memory_analysis()` only return sums over the whole
program, and the object behind `runtime_executable()` has no documented methods.

The text of a program lists computations, which consist of instructions. Loops, fusions and
asynchronous operations call other computations. Instructions in the body of a loop count once per
iteration.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
COLLECTIVE_KINDS += ("collective-permute", "collective-broadcast")


class HloArray(NamedTuple):
    """Array in the result of an instruction.

    `space` is the memory space of the array; "" is the main memory.
    """

    dtype: str
    sizes: tuple[int, ...]
    space: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return bits * prod(self.sizes) // 8


class Instruction(NamedTuple):
    """An instruction, written as: name = shape operation(arguments), attributes.

    Attributes:
        name: The name of the instruction's result.
        shape: The shape of the result, or the shapes of a tuple.
        operation: The operation.
        arguments: The names of the operands, or the value of a constant.
        attributes: The text after the closing parenthesis of the arguments.
    """

    name: str
    shape: str
    operation: str
    arguments: str
    attributes: str

    @property
    def arrays(self) -> list[HloArray]:
        """The arrays that the instruction returns."""
        return [
            HloArray(dtype, tuple(int(n) for n in sizes.split(",") if n), space)
            for dtype, sizes, space in _ARRAY.findall(self.shape)
        ]

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def number(self, pattern: str) -> int | None:
        """Returns the number that a pattern captures in the attributes, or None without a match."""
        found = re.search(pattern, self.attributes)
        return int(found[1]) if found else None

    def called(self, *attributes: str) -> list[str]:
        """Returns the names of the computations in attributes such as "body" and "condition"."""
        pattern = rf"(?:{'|'.join(attributes)})=(?:\{{(.*?)\}}|(%?[\w.\-]+))"
        lists = (many or one for many, one in re.findall(pattern, self.attributes))
        return [name.lstrip("%") for names in lists for name in names.split(", ")]


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)?(.*)$")
_ARRAY = re.compile(
    r"\b(pred|bf16|[suf]\d+(?:e\d\w*)?|c64|c128)\[([\d,]*)\](?:\{[^{}]*?(S\(\d+\))?\})?"
)
Computations = dict[str, dict[str, Instruction]]  # The last instruction returns the result.


def computations(text: str) -> tuple[Computations, str]:
    """Returns the instructions of each computation by name, and the name of the entry computation.

    Raises:
        ValueError: The text has no entry computation.
    """
    found, entry, current = {}, "", None
    for line in text.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            words = line.split()
            name = words[words[0] == "ENTRY"].lstrip("%")
            entry = name if words[0] == "ENTRY" else entry
            current = found.setdefault(name, {})
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current[match[1]] = Instruction(*match.groups())
    if not entry:
        raise ValueError("the text is not a compiled program: it has no ENTRY computation")
    return found, entry


def walk(text: str) -> Iterator[tuple[Instruction, str, int | None]]:
    """Yields (instruction, name of its computation, number of its runs or None if unknown).

    The function visits all branches of a conditional.
    """
    found, entry = computations(text)

    def visit(name: str, times: int | None) -> Iterator[tuple[Instruction, str, int | None]]:
        for instruction in found[name].values():
            yield instruction, name, times
            if instruction.operation in ("async-update", "async-done"):
                continue  # `visit` entered the called computation at async-start.
            trips = _trips(instruction, found) if instruction.operation == "while" else 1
            more = None if times is None or trips is None else times * trips
            for called in instruction.called("body", "calls", "to_apply", "branch_computations"):
                if called in found:
                    yield from visit(called, more)

    yield from visit(entry, 1)


def _trips(loop: Instruction, found: Computations) -> int | None:
    """Returns the number of iterations of a loop, or None if it is unknown.

    In programs for CPUs and GPUs, an attribute of the loop contains the number of iterations. In
    programs for TPUs, the function computes the number from the loop condition (counter < bound)
    and the increment. The counter starts at 0.
    """
    if known := loop.number(r'"?known_trip_count"?:\{"?n"?:"(\d+)"\}'):
        return known
    condition, body = (found[loop.called(part)[0]] for part in ("condition", "body"))
    test = next((x for x in condition.values() if x.operation == "compare"), None)
    if test is None or "direction=LT" not in test.attributes:
        return None
    counter, bound = (condition.get(name) for name in test.operands[:2])
    if counter is None or bound is None or bound.operation != "constant":
        return None
    index = counter.number(r"index=(\d+)")
    after = list(body.values())[-1].operands  # The elements of the tuple that the body returns.
    step = None if index is None else _offset(after[index], body, index)
    return -(-int(bound.arguments) // step) if step else None


def _offset(name: str, lines: dict[str, Instruction], index: int) -> int | None:
    """Returns c if a value is the sum of the loop counter and a constant c, otherwise None.

    Args:
        name: The name of the instruction that computes the value.
        lines: The instructions of the loop body.
        index: The index of the loop counter in the tuple of loop variables.
    """
    line = lines.get(name)
    if line is None:
        return None
    if line.operation == "get-tuple-element":
        return 0 if line.number(r"index=(\d+)") == index else None
    if line.operation == "copy":
        return _offset(line.operands[0], lines, index)
    if line.operation != "add":
        return None
    value, added = line.operands
    before, more = _offset(value, lines, index), lines.get(added)
    if before is None or more is None or more.operation != "constant":
        return None
    return before + int(more.arguments)


class Collective(NamedTuple):
    """Collective operation, which exchanges arrays between the devices of a group.

    Attributes:
        kind: An element of `COLLECTIVE_KINDS`.
        size: The bytes of the whole arrays: the output of a gather, or the input of a scatter.
        devices: The number of devices in a group.
        times: How often the program runs the operation.
    """

    kind: str
    size: int
    devices: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends (and receives) over all runs.

        In a ring of n devices, each run of the operation sends size · (n − 1)/n bytes per device.
        An all-reduce sends twice as many bytes, because it is a scatter and a gather. In a
        permutation or a broadcast, each device sends the whole array.
        """
        if self.kind.startswith("collective-"):
            return float(self.times * self.size)
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * self.size * rounds * (self.devices - 1) / self.devices


def collectives(text: str) -> list[Collective]:
    """Returns the collective operations of a program.

    A TPU program may split one operation into several instructions with the same channel,
    interleaved with other work. The returned list has one entry per operation, whose `times` is the
    minimum over the instructions of the operation.

    Raises:
        ValueError: The number of runs of an operation is unknown.
    """
    devices = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    everyone = int(devices[1]) if devices else 1
    channels: dict[str | int, Counter[tuple[str, Collective]]] = {}
    for instruction, computation, times in walk(text):
        found = _collective(instruction, computation, everyone)
        if found is None or found.devices == 1:
            continue
        if times is None:
            raise ValueError(
                f"the program does not show how often it runs {instruction.name}: the trip "
                "count of a loop is unknown"
            )
        channel = instruction.number(r"channel_id=(\d+)")
        pieces = channels.setdefault(instruction.name if channel is None else channel, Counter())
        pieces[instruction.name, found] += times
    return [
        found._replace(times=times)
        for pieces in channels.values()
        for (_, found), times in _merge_pieces(pieces)
    ]


def _merge_pieces(
    pieces: Counter[tuple[str, Collective]],
) -> list[tuple[tuple[str, Collective], int]]:
    """Returns the collective operations of the instructions with the same channel id.

    If all instructions have the same type, they are pieces of one operation, and the function
    returns only the piece that runs least often. If the types differ, the function returns all
    instructions, because JAX gives separate collectives of `shard_map` the same channel.
    """
    kinds = {found.kind for _, found in pieces}
    return list(pieces.items()) if len(kinds) > 1 else [min(pieces.items(), key=lambda x: x[1])]


def _collective(instruction: Instruction, computation: str, everyone: int) -> Collective | None:
    """Returns the collective operation that an instruction starts; its field `times` is 0.

    Returns None if the instruction does not start a collective operation.
    """
    kind = instruction.operation.removesuffix("-start")
    if kind not in COLLECTIVE_KINDS:
        return None
    group, arrays = _group(instruction.attributes, everyone), instruction.arrays
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        # On TPUs, some arrays are synchronization flags (u32). The first half of the remaining
        # arrays are operands, and the second half are results.
        arrays = [x for x in arrays if (x.dtype, x.num_bytes) != ("u32", 4)]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(x.num_bytes for x in arrays)
    if kind == "reduce-scatter":
        size *= group
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        # On TPUs, the all-reduce in a fusion with this name stores only one shard of the sum on
        # each device.
        kind = "reduce-scatter"
    return Collective(kind, size, group, 0)


def _group(attributes: str, everyone: int) -> int:
    """Returns the number of devices in a group.

    XLA writes groups as lists of devices, as [groups, devices per group], or as axes of a mesh.
    """
    if "source_target_pairs={}" in attributes:
        return 1
    if "source_target_pairs=" in attributes:
        return 2
    if axes := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes[2])
        return prod(int(part or sizes[name]) for name, part in parts)
    if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(shape[1])
    if members := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(members[1].split(","))
    if "replica_groups={}" in attributes or "replica_groups=" not in attributes:
        return everyone
    raise ValueError(f"jaxformer cannot parse the device groups of a collective: {attributes}")


class Total(NamedTuple):
    """Totals over the collectives of one type: the runs, and the bytes that one device sends."""

    count: int
    sent: float


def by_kind(found: list[Collective]) -> dict[str, Total]:
    """Returns the totals of each type of collective that occurs."""
    groups = {kind: [one for one in found if one.kind == kind] for kind in COLLECTIVE_KINDS}
    return {
        kind: Total(sum(one.times for one in group), sum(one.sent for one in group))
        for kind, group in groups.items()
        if group
    }


def copies(text: str, shape: tuple[int, ...]) -> int:
    """Counts how often a program copies arrays of a given shape.

    Shapes count as equal if they differ only in the order of axes or in axes of size 1. The
    function does not count moves between two memory spaces of a device.

    Args:
        text: The compiled program.
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
    """Returns whether a copy moves an array between two memory spaces."""
    return copy.operation == "copy-start" and len({x.space for x in copy.arrays[:2]}) > 1
