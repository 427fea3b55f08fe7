"""Reads the communication of a compiled program from its text.

The text (`Compiled.as_text()`) consists of computations. Loops, fusions and asynchronous operations
call other computations. Instructions in the body of a loop count once per iteration.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
KINDS += ("collective-permute", "collective-broadcast")


class Collective(NamedTuple):
    """Exchange between the devices of a group.

    Attributes:
        kind: One of `KINDS`.
        dtype: The dtypes of its arrays.
        size: Bytes of the whole arrays: the output of a gather, the input of a scatter.
        devices: The number of devices in a group.
        times: How often the program runs it.
    """

    kind: str
    dtype: str
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


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name: The name of the result.
        shape: The text of the result's shape.
        operation: The name of the operation.
        rest: The text after the operation.
    """

    name: str
    shape: str
    operation: str
    rest: str


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+(?:e\d\w*)?|c64|c128)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"(\d+)"\}')


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses the text of a program.

    Returns:
        (the instructions of each computation by its name, the name of the entry computation).

    Raises:
        ValueError: The text has no entry computation.
    """
    found, entry, current = {}, "", None
    for line in text.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            words = line.split()
            name = words[words[0] == "ENTRY"].lstrip("%")
            entry = name if words[0] == "ENTRY" else entry
            current = found.setdefault(name, [])
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups()))
    if not entry:
        raise ValueError("the text is not a compiled program: it has no ENTRY computation")
    return found, entry


def walk(text: str) -> Iterator[tuple[Instruction, str, int | None]]:
    """Yields every instruction that a program runs. All branches of a conditional count.

    Yields:
        (instruction, the name of its computation, how often it runs). The last is None if it is
        not known.
    """
    found, entry = computations(text)

    def visit(name: str, times: int | None) -> Iterator[tuple[Instruction, str, int | None]]:
        for instruction in found[name]:
            yield instruction, name, times
            if instruction.operation in ("async-update", "async-done"):
                continue  # their computation was counted at async-start
            trips = _trips(instruction, found) if instruction.operation == "while" else 1
            more = None if times is None or trips is None else times * trips
            for called in _called(instruction.rest):
                if called in found:
                    yield from visit(called, more)

    yield from visit(entry, 1)


def _called(rest: str) -> list[str]:
    return [x.lstrip("%") for names in _CALLED.findall(rest) for x in names.split(", ") if x]


def _trips(loop: Instruction, found: dict[str, list[Instruction]]) -> int | None:
    """Returns the number of iterations of a loop, or None if it is not known.

    It is the compiler's trip count or else follows from the condition, counter < bound, and the
    increment of the counter, which starts at 0.
    """
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition, body = (
        {line.name: line for line in found[re.findall(rf"{part}=%?([\w.\-]+)", loop.rest)[0]]}
        for part in ("condition", "body")
    )
    test = next((x for x in condition.values() if x.operation == "compare"), None)
    if test is None or "direction=LT" not in test.rest:
        return None
    counter, bound = (condition.get(name) for name in _operands(test)[:2])
    if counter is None or bound is None or bound.operation != "constant":
        return None
    index = re.search(r"index=(\d+)", counter.rest)
    after = _operands(list(body.values())[-1])  # elements of the tuple that the body returns
    step = index and _offset(after[int(index[1])], body, index[0])
    return -(-_constant(bound) // step) if step else None


def _offset(name: str, lines: dict[str, Instruction], index: str) -> int | None:
    """Returns the constant that a named value adds to the tuple element with this index.

    None: the value is not such a sum.
    """
    line = lines.get(name)
    if line is None or line.operation == "get-tuple-element":
        return 0 if line and re.search(rf"{index}\b", line.rest) else None
    if line.operation == "copy":
        return _offset(_operands(line)[0], lines, index)
    if line.operation != "add":
        return None
    value, added = _operands(line)
    before, more = _offset(value, lines, index), lines.get(added)
    if before is None or more is None or more.operation != "constant":
        return None
    return before + _constant(more)


def _operands(line: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", line.rest.split(")")[0])


def _constant(line: Instruction) -> int:
    return int(line.rest.split(")")[0])


def collectives(text: str) -> list[Collective]:
    """Returns the exchanges between the devices of a program.

    A TPU program may split one exchange into several instructions of one channel, between other
    work. They count as one exchange, with the count of the instruction that runs least often.

    Raises:
        ValueError: It is not known how often an exchange runs.
    """
    devices = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    everyone = int(devices[1]) if devices else 1
    runs: dict[str, Counter[tuple]] = {}
    for instruction, computation, times in walk(text):
        kind = instruction.operation.removesuffix("-start")
        if kind in KINDS and (group := _group(instruction.rest, everyone)) > 1:
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
    found = []
    for pieces in runs.values():
        (instruction, kind, group), times = min(pieces.items(), key=lambda item: item[1])
        arrays = _exchanged(kind, instruction, group)
        dtypes, size = "/".join(sorted({x for x, _ in arrays})), sum(n for _, n in arrays)
        found.append(Collective(kind, dtypes, size, group, times))
    return found


def _exchanged(kind: str, instruction: Instruction, group: int) -> list[tuple[str, int]]:
    """Returns (dtype, bytes) of each whole array of an exchange."""
    arrays = _arrays(instruction.shape)
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        arrays = [x for x in arrays if x != ("u32", 4)]  # synchronization flags of TPUs
        arrays = arrays[len(arrays) // 2 :]  # the first half are operands, the second results
    scattered = kind == "reduce-scatter" and instruction.operation != "all-reduce"
    return [(dtype, size * group if scattered else size) for dtype, size in arrays]


def _arrays(shape: str) -> list[tuple[str, int]]:
    """Returns (dtype, bytes) of each array in the text of a shape."""
    return [
        (dtype, _bits(dtype) * prod(int(n) for n in sizes.split(",") if n) // 8)
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


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
    """Sums over the collectives of one kind.

    Attributes:
        count: The number of runs.
        sent: The bytes that one device sends.
    """

    count: int
    sent: float


def by_kind(found: list[Collective]) -> dict[str, Total]:
    """Returns the sums of each kind of collective that occurs."""
    groups = {kind: [one for one in found if one.kind == kind] for kind in KINDS}
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
    wanted = sorted(n for n in shape if n != 1)
    return sum(
        times or 1
        for line, _, times in walk(text)
        if line.operation in ("copy", "copy-start")
        and wanted in _shapes(line.shape)
        and (line.operation == "copy" or len(set(_spaces(line.shape)[:2])) == 1)
    )


def _shapes(shape: str) -> list[list[int]]:
    """Returns the sorted sizes of each array in the text of a shape, without sizes of 1."""
    each = (sizes.split(",") for _, sizes in _ARRAY.findall(shape))
    return [sorted(int(n) for n in sizes if n not in ("", "1")) for sizes in each]


def _spaces(shape: str) -> list[str]:
    """Returns the memory space of each array, S(n) in its layout; "" is the main memory."""
    layouts = re.findall(r"\]\{([^{}]*)\}", shape)
    return [found[0] if (found := re.findall(r"S\(\d+\)", layout)) else "" for layout in layouts]
