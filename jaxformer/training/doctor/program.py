"""A compiled program, read: what its devices exchange.

XLA writes a program out as text (`Compiled.as_text()`): computations, of which loops, fusions and
asynchronous operations call others. The body of a loop counts as often as it is run.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """An exchange between the devices of a group. size: bytes of the whole array (or of several at
    once), which is what a gather gives and what a scatter is given; devices: of a group; times: how
    often it is run."""

    kind: str
    dtype: str
    size: int
    devices: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends, and receives, in all, where n devices pass parts on around a
        ring: size · (n − 1)/n, of an all-reduce twice that, as it is a scatter and a gather; all of
        it, where each passes on an array of its own."""
        if self.kind.startswith("collective-"):
            return float(self.times * self.size)
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * self.size * rounds * (self.devices - 1) / self.devices


class Instruction(NamedTuple):
    """One line: the text of its shape, its operation, and the text after that."""

    name: str
    shape: str
    operation: str
    rest: str


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+(?:e\d\w*)?|c64|c128)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"(\d+)"\}')


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(the instructions of each computation by its name, the name of the one that is entered)."""
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
        raise ValueError("the text is not of a compiled program: no computation is entered")
    return found, entry


def walk(text: str) -> Iterator[tuple[Instruction, str, int | None]]:
    """(instruction, the computation that it is in, how often it is run) of a whole program. None:
    that is not known. Of a conditional every branch is counted."""
    found, entry = computations(text)

    def visit(name: str, times: int | None):
        for instruction in found[name]:
            yield instruction, name, times
            if instruction.operation in ("async-update", "async-done"):
                continue  # they name what was started again
            trips = _trips(instruction, found) if instruction.operation == "while" else 1
            more = None if None in (times, trips) else times * trips
            for called in _called(instruction.rest):
                if called in found:
                    yield from visit(called, more)

    yield from visit(entry, 1)


def _called(rest: str) -> list[str]:
    return [x.lstrip("%") for names in _CALLED.findall(rest) for x in names.split(", ") if x]


def _trips(loop: Instruction, found) -> int | None:
    """How often a loop's body is run: as the compiler says, or from its condition, counter < bound,
    and what the body adds to the counter, which begins at 0."""
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition, body = (
        {line.name: line for line in found[re.search(rf"{part}=%?([\w.\-]+)", loop.rest)[1]]}
        for part in ("condition", "body")
    )
    test = next((x for x in condition.values() if x.operation == "compare"), None)
    if test is None or "direction=LT" not in test.rest:
        return None
    counter, bound = (condition.get(name) for name in _operands(test)[:2])
    if counter is None or bound is None or bound.operation != "constant":
        return None
    index = re.search(r"index=(\d+)", counter.rest)
    after = _operands(list(body.values())[-1])  # of the tuple that the body gives
    step = index and _offset(after[int(index[1])], body, index[0])
    return -(-_constant(bound) // step) if step else None


def _offset(name: str, lines: dict[str, Instruction], index: str) -> int | None:
    """What is added to the element of that index to give the value of that name."""
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
    """What the devices of a program exchange with one another.

    A TPU's program may do one exchange in pieces, between other work: then several instructions of
    one channel stand for it, and it counts once, as often as the one that is run least.
    """
    devices = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    everyone = int(devices[1]) if devices else 1
    runs: dict[str, dict[tuple, int]] = {}
    for instruction, computation, times in walk(text):
        kind = instruction.operation.removesuffix("-start")
        if kind in KINDS and (group := _group(instruction.rest, everyone)) > 1:
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # on TPU a fusion: each device keeps its part of the sum
            channel = re.search(r"channel_id=\d+", instruction.rest)
            if times is None:
                raise ValueError(f"it is not known how often {instruction.name} is run")
            pieces = runs.setdefault(channel[0] if channel else instruction.name, {})
            piece = (instruction, kind, group)
            pieces[piece] = pieces.get(piece, 0) + times
    found = []
    for pieces in runs.values():
        (instruction, kind, group), times = min(pieces.items(), key=lambda item: item[1])
        arrays = _exchanged(kind, instruction, group)
        dtypes, size = "/".join(sorted({x for x, _ in arrays})), sum(n for _, n in arrays)
        found.append(Collective(kind, dtypes, size, group, times))
    return found


def _exchanged(kind: str, instruction: Instruction, group: int) -> list[tuple[str, int]]:
    """(type, bytes) of each whole array."""
    arrays = _arrays(instruction.shape)
    if instruction.operation.endswith("-start") and kind != "all-reduce":
        arrays = [x for x in arrays if x != ("u32", 4)]  # a TPU's marks
        arrays = arrays[len(arrays) // 2 :]  # operands stand before results
    scattered = kind == "reduce-scatter" and instruction.operation != "all-reduce"
    return [(dtype, size * group if scattered else size) for dtype, size in arrays]


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(type, bytes) of each array of a shape's text."""
    return [
        (dtype, _bits(dtype) * prod(int(n) for n in sizes.split(",") if n) // 8)
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])


def _group(rest: str, everyone: int) -> int:
    """Devices of a group: as lists of them, as [groups, devices], or as axes of a mesh."""
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
    """What is exchanged by collectives of one kind: how many are run, and the bytes that a device
    sends."""

    count: int
    sent: float


def by_kind(found: list[Collective]) -> dict[str, Total]:
    """The sums of each kind that there is."""
    return {
        kind: Total(
            sum(one.times for one in found if one.kind == kind),
            sum(one.sent for one in found if one.kind == kind),
        )
        for kind in KINDS
        if any(one.kind == kind for one in found)
    }


def copies(text: str, shape: tuple[int, ...]) -> int:
    """How often a program copies an array of that shape, whatever the order of its axes; those of
    size 1 do not count. What is moved between a device's kinds of memory is not a copy."""
    wanted = sorted(n for n in shape if n != 1)
    return sum(
        times or 1
        for line, _, times in walk(text)
        if line.operation in ("copy", "copy-start")
        and wanted in _shapes(line.shape)
        and (line.operation == "copy" or len(set(_spaces(line.shape)[:2])) == 1)
    )


def _shapes(shape: str) -> list[list[int]]:
    """The sizes of each array of a shape's text, but 1, in order of size."""
    each = (sizes.split(",") for _, sizes in _ARRAY.findall(shape))
    return [sorted(int(n) for n in sizes if n not in ("", "1")) for sizes in each]


def _spaces(shape: str) -> list[str]:
    """The memory in which each array is: S(n) in its layout; none: the device's main memory."""
    layouts = re.findall(r"\]\{([^{}]*)\}", shape)
    return [found[0] if (found := re.findall(r"S\(\d+\)", layout)) else "" for layout in layouts]
