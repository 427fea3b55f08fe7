"""Reads the instructions of a compiled program, and how often each of them runs.

They are read from the text of the program, `Compiled.as_text()`. JAX has no other interface that
shows them: `cost_analysis()` and `memory_analysis()` only give sums over the whole program, and the
object behind `runtime_executable()` has no documented methods.

The text consists of computations. Loops, fusions and asynchronous operations call other
computations. Instructions in the body of a loop count once per iteration.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class HloArray(NamedTuple):
    """Array in the result of an instruction: dtype, shape, and memory ("" is the main memory)."""

    dtype: str
    sizes: tuple[int, ...]
    space: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return bits * prod(self.sizes) // 8


class Instruction(NamedTuple):
    """Line of a program: the result's name and shape, the operation, and the text after it."""

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def arrays(self) -> list[HloArray]:
        """The arrays of the result."""
        return [
            HloArray(dtype, tuple(int(n) for n in sizes.split(",") if n), space)
            for dtype, sizes, space in _ARRAY.findall(self.shape)
        ]

    @property
    def arguments(self) -> str:
        """The text between the parentheses of the operation."""
        return self.rest.partition(")")[0]

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self, *attributes: str) -> list[str]:
        """Returns the names of the computations that these attributes list."""
        pattern = rf"(?:{'|'.join(attributes)})=(?:\{{(.*?)\}}|(%?[\w.\-]+))"
        lists = (many or one for many, one in re.findall(pattern, self.rest))
        return [name.lstrip("%") for names in lists for name in names.split(", ")]


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(
    r"\b(pred|bf16|[suf]\d+(?:e\d\w*)?|c64|c128)\[([\d,]*)\](?:\{[^{}]*?(S\(\d+\))?\})?"
)
Computations = dict[str, dict[str, Instruction]]  # the last instruction returns the result


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
    """Yields (instruction, name of its computation, how often it runs; None: that is not known).

    All branches of a conditional count.
    """
    found, entry = computations(text)

    def visit(name: str, times: int | None) -> Iterator[tuple[Instruction, str, int | None]]:
        for instruction in found[name].values():
            yield instruction, name, times
            if instruction.operation in ("async-update", "async-done"):
                continue  # their computation was counted at async-start
            trips = _trips(instruction, found) if instruction.operation == "while" else 1
            more = None if times is None or trips is None else times * trips
            for called in instruction.called("body", "calls", "to_apply", "branch_computations"):
                if called in found:
                    yield from visit(called, more)

    yield from visit(entry, 1)


def _trips(loop: Instruction, found: Computations) -> int | None:
    """Returns the number of iterations of a loop, or None if it is not known.

    Compilers for CPUs and GPUs state it. For TPUs it follows from the condition, counter < bound,
    and the increment of the counter, which starts at 0.
    """
    if known := re.search(r'"?known_trip_count"?:\{"?n"?:"(\d+)"\}', loop.rest):
        return int(known[1])
    condition, body = (found[loop.called(part)[0]] for part in ("condition", "body"))
    test = next((x for x in condition.values() if x.operation == "compare"), None)
    if test is None or "direction=LT" not in test.rest:
        return None
    counter, bound = (condition.get(name) for name in test.operands[:2])
    if counter is None or bound is None or bound.operation != "constant":
        return None
    index = re.search(r"index=(\d+)", counter.rest)
    after = list(body.values())[-1].operands  # elements of the tuple that the body returns
    step = index and _offset(after[int(index[1])], body, index[0])
    return -(-int(bound.arguments) // step) if step else None


def _offset(name: str, lines: dict[str, Instruction], index: str) -> int | None:
    """Returns the constant that a named value adds to the tuple element with this index.

    None: the value is not such a sum.
    """
    line = lines.get(name)
    if line is None or line.operation == "get-tuple-element":
        return 0 if line and re.search(rf"{index}\b", line.rest) else None
    if line.operation == "copy":
        return _offset(line.operands[0], lines, index)
    if line.operation != "add":
        return None
    value, added = line.operands
    before, more = _offset(value, lines, index), lines.get(added)
    if before is None or more is None or more.operation != "constant":
        return None
    return before + int(more.arguments)
