"""Limits on the steps, the seconds and the memory of a chat template.

jinja2's sandbox does not limit how long a template runs, nor how long its strings become. Here,
each rendering has a budget of steps, characters and seconds. Each loop step and each call uses one
step, and each string that the template makes uses as many characters as the string has.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# A published template needs a few thousand steps for a long conversation.
MOST_STEPS = 1_000_000
MOST_SECONDS = 20.0
# Limits of the total length of all strings that a rendering makes, and of the length of one string.
MOST_CHARACTERS = 1_000_000_000
LONGEST_TEXT = 20_000_000
# Larger integers must not be arguments of filters and methods, which use them as widths.
_LARGEST_NUMBER = 100_000
_WIDE_FIELD = re.compile(r"\d{4}|\*|[:!][^{}]*\{")
_WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent"}


class Budget:
    """The steps, characters and seconds that remain to a rendering."""

    def __init__(self) -> None:
        """Starts with the limits of this module."""
        self.steps, self.characters = MOST_STEPS, MOST_CHARACTERS
        self.end = time.monotonic() + MOST_SECONDS

    def step(self) -> None:
        """Subtracts one step from the budget.

        Raises:
            SecurityError: No steps or no seconds remain.
        """
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.end:
            raise SecurityError(
                f"it needs more than {MOST_STEPS:,} steps or {MOST_SECONDS:.0f} seconds"
            )

    def text(self, length: int) -> None:
        """Subtracts the length of a new string from the budget.

        Raises:
            SecurityError: The string is too long, or no characters remain.
        """
        self.characters -= length
        if length > LONGEST_TEXT or self.characters < 0:
            raise SecurityError(f"it makes a text of more than {LONGEST_TEXT:,} characters")


# The budget of the current rendering.
BUDGET: ContextVar[Budget] = ContextVar("budget of a chat template")


@jinja2.pass_context  # Without the context, jinja2 would call the function at compile time.
def written(_: Context, value: Any) -> Any:
    """Subtracts the length of a printed value from the budget, and returns the value."""
    if isinstance(value, str):
        BUDGET.get().text(len(value))
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with a budget for each rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template and adds the calls that use the budget."""
        return _Bounding().visit(super()._parse(source, name, filename)).set_environment(self)

    def counted(self, items: Iterable) -> Iterator:
        """Yields the items of a loop; each item uses a step of the budget."""
        budget = BUDGET.get()
        for item in items:
            budget.step()
            yield item

    def concatenated(self, *parts: Any) -> str:
        """Concatenates values, like the operator `~`."""
        texts = list(map(str, parts))
        BUDGET.get().text(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Calls a function or method of a template."""
        budget = BUDGET.get()
        budget.step()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            name = function.__name__
            if name == "join" and len(args) == 1:
                args = (_joined_texts(*args, owner),)
            else:
                _check_arguments(name, (owner, *args), named)
        result = super().call(context, function, *args, **named)
        if isinstance(result, str):
            budget.text(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes +, *, ** or % after a check of the size of the result."""
        budget = BUDGET.get()
        budget.step()
        if operator == "**" or (operator == "*" and _are_integers(left, right)):
            _check_power(left, right)
        elif operator == "*":
            for many, number in ((left, right), (right, left)):
                if isinstance(number, int) and hasattr(many, "__len__"):
                    budget.text(len(many) * max(number, 0))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.text(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


class _Bounding(NodeTransformer):
    """Changes loops, `~` and plain text, so that a `BoundedEnvironment` can measure them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Counts the steps of a loop."""
        self.generic_visit(node)
        node.iter = self._call("counted", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        """Measures the result of the operator `~`."""
        self.generic_visit(node)
        return self._call("concatenated", node.nodes)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        """Makes the text between statements a constant, which `finalize` measures when printed."""
        return nodes.Const(node.data)

    def _call(self, method: str, arguments: list) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def bounded_filter(name: str, function: Callable) -> Callable:
    """Returns the filter with checks of its arguments and of the length of its result."""
    given = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        budget = BUDGET.get()
        budget.step()
        if name == "join" and len(args) > given:
            separator = named.get("d", "".join(map(str, args[given + 1 : given + 2])))
            args = (*args[:given], _joined_texts(args[given], separator), *args[given + 1 :])
        else:
            _check_arguments(name, args[given:], named)
        result = function(*args, **named)
        if isinstance(result, str):
            budget.text(len(result))
        return result

    return bounded


def _check_arguments(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Checks the arguments of a filter, or of a method of a string.

    Args:
        name: The filter or the method.
        args: The positional arguments; the first is the filtered value, or the string.
        named: The arguments by name.

    Raises:
        SecurityError: The result may be too long.
    """
    budget, values = BUDGET.get(), (*args[1:], *named.values())
    numbers = [x for x in values if isinstance(x, int)]
    if any(abs(x) > _LARGEST_NUMBER for x in numbers):
        raise SecurityError(f"{name} has an argument above {_LARGEST_NUMBER:,}")
    text = args[0] if args else None
    if not isinstance(text, str):
        return
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and len(args) > 2:
        old, new = str(args[1]), str(args[2])
        budget.text(len(text) + text.count(old) * len(new))
    elif name in _WIDENING:
        lines = 1 + text.count("\n") + text.count("\t")
        budget.text(len(text) + lines * max([8, *numbers, *map(_length, values)]))


def _joined_texts(items: Iterable, separator: Any) -> list:
    """Returns the items that `join` will join, after a check of the length of the result."""
    listed = list(items)
    budget = BUDGET.get()
    budget.text(sum(len(str(x)) for x in listed) + len(str(separator)) * len(listed))
    return listed


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _check_format(text: str) -> None:
    """Raises SecurityError for a format whose fields are wider than 999 characters."""
    if _WIDE_FIELD.search(text):
        raise SecurityError("it formats with a field of more than 999 characters")


def _are_integers(left: Any, right: Any) -> bool:
    return isinstance(left, int) and isinstance(right, int)


def _check_power(left: Any, right: Any) -> None:
    """Raises SecurityError for a power or product of large integers."""
    if _are_integers(left, right) and (
        abs(right) > _LARGEST_NUMBER or left.bit_length() > 1000 or right.bit_length() > 1000
    ):
        raise SecurityError("it computes with very large integers")
