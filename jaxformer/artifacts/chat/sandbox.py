"""Renders chat templates, which are untrusted programs.

jinja2's immutable sandbox keeps a template away from Python's internals, files and modules, and
`limits` bounds its time and memory.

Chat templates are rendered with the options, filters and globals of transformers, so that the
rendered texts equal the texts that transformers renders.

Reference: `_cached_compile_jinja_template` in transformers/utils/chat_template_utils.py.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from jaxformer.artifacts.chat.limits import (
    BUDGET,
    LONGEST_TEXT,
    BoundedEnvironment,
    Budget,
    bounded_filter,
    written,
)

LONGEST_SOURCE = 1_000_000
# These functions look for links and tags with regular expressions, or make random text.
_REMOVED_FILTERS = ("urlize", "striptags", "xmlattr")
_REMOVED_GLOBALS = ("lipsum",)
# The characters that mark the start and the end of the assistant's text, or None.
_MARKS: ContextVar[tuple[str, str] | None] = ContextVar("marks of the assistant", default=None)


@contextmanager
def _rendering(marks: tuple[str, str] | None) -> Generator[None]:
    tokens = (BUDGET.set(Budget()), _MARKS.set(marks))
    try:
        yield
    finally:
        BUDGET.reset(tokens[0])
        _MARKS.reset(tokens[1])


def render(source: str, variables: Mapping[str, Any], marks: tuple[str, str] | None = None) -> str:
    """Renders a template.

    Args:
        source: The template.
        variables: Plain JSON data by name.
        marks: Two characters that enclose the text of each `{% generation %}` block in the result.
            By default, such text is not marked.

    Raises:
        ValueError: The template is malformed, raises an error or exceeds a limit.
    """
    try:
        with _rendering(marks):
            return "".join(_counted_texts(_compiled(source).generate(variables)))
    except TemplateError as error:
        raise ValueError(f"the chat template failed: {_one_line(error)}") from None
    except RecursionError:
        raise ValueError("the chat template failed: it nests too deeply") from None
    except (TypeError, ArithmeticError, LookupError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise ValueError(f"the chat template failed: {reason}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _counted_texts(parts: Iterable[str]) -> Iterator[str]:
    length, budget = 0, BUDGET.get()
    for part in parts:
        length += len(part)
        if length > LONGEST_TEXT:
            budget.text(length)
        yield part


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > LONGEST_SOURCE:
        raise SecurityError(
            f"it has {len(source):,} characters; at most {LONGEST_SOURCE:,} are read"
        )
    added = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return _environment().from_string(source, globals=added)


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # Otherwise, constant expressions would be computed without a budget.
        finalize=written,
        extensions=[GenerationBlocks, loopcontrols],
    )
    environment.filters = {
        name: bounded_filter(name, function)
        for name, function in {**environment.filters, "tojson": _tojson}.items()
        if name not in _REMOVED_FILTERS
    }
    for name in _REMOVED_GLOBALS:
        environment.globals.pop(name, None)
    return environment


# ---- filters and globals that transformers adds to jinja2


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON. Unlike jinja2's filter, this neither sorts keys by default nor escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class TemplateDict:
    """The global `dict` of a template, without the attributes of Python's class."""

    def __call__(self, *args: Any, **entries: Any) -> dict:
        """Returns a new dict."""
        return dict(*args, **entries)

    def fromkeys(self, keys: Iterable, value: Any = None) -> dict:
        """Returns a dict with these keys and one value."""
        return dict.fromkeys(keys, value)


class TemplateNamespace(Namespace):
    """The global `namespace` of a template, which refuses names that begin with "_"."""

    def __init__(*args: Any, **entries: Any) -> None:  # noqa: D107 (`self` may be an entry)
        self, *pairs = args
        content = dict(*pairs, **entries)
        for name in content:
            _check_name(name)
        Namespace.__init__(self, content)

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets an entry."""
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores the name {name!r}, which begins with an underscore")


class GenerationBlocks(Extension):
    """The statement `{% generation %}`, which encloses what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Parses a block up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("enclose")
        return nodes.CallBlock(call, [], [], body, lineno=line)

    def enclose(self, caller: Callable[[], str]) -> str:
        """Returns the text of the block between the marks of this rendering."""
        marks = _MARKS.get()
        return caller() if marks is None else marks[0] + caller() + marks[1]
