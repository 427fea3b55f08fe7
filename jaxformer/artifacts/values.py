"""JSON representation of frozen dataclasses, {"class": name, field: value, …}, and of functions.

The JSON contains the names of classes and functions. By default, reading never imports modules.
jaxformer's own classes are stored by their plain names. Other classes and functions are stored as
"module:name", and the caller passes the objects to the reader. If no passed object has the stored
module, the reader compares only the names, so a class may move to another module. The reader
imports the names only if the caller trusts the JSON and passes trust_code=True.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from inspect import isabstract, ismethod
from typing import Any, Literal

from jaxformer.artifacts.own_code import import_named
from jaxformer.functional import position_vectors
from jaxformer.functional.attention import masks, own_masks, scores
from jaxformer.functional.layers import (
    attention,
    convolution,
    cross_attention,
    experts,
    feedforward,
    gated_delta,
    layer,
    norms,
    plain,
    recurrent,
    short_convolution,
)
from jaxformer.models.config.check import shown
from jaxformer.models.config.transformer import RotaryScaling

# A dataclass, or a function that a field of a dataclass contains.
Named = type | Callable[..., Any]

_MIXERS = (attention, convolution, cross_attention, gated_delta, recurrent, short_convolution)
_MODULES = (experts, feedforward, layer, masks, norms, own_masks, plain, position_vectors, scores)
_MODULES += _MIXERS
# The dataclasses for layers, for masks and for parts of layers and masks, by the class name.
_KNOWN = {RotaryScaling.__name__: RotaryScaling} | {
    name: kind
    for module in _MODULES
    for name, kind in vars(module).items()
    if is_dataclass(kind) and kind.__module__ == module.__name__ and not isabstract(kind)
}


def to_json(value: Any, where: str) -> Any:
    """Converts a value to JSON data.

    Args:
        value: A frozen dataclass, function, tuple, number, string, bool or None.
        where: The name of the value, for error messages.

    Raises:
        ValueError: The value or one of its fields has a type that cannot be stored, or a class or
            function was not defined at the top level of a module.
    """
    if isinstance(value, tuple | list):
        return [to_json(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        own = {x.name: to_json(getattr(value, x.name), f"{where}.{x.name}") for x in fields(value)}
        return {"class": _registered_name(type(value), where), **own}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value) and hasattr(value, "__qualname__") and not isinstance(value, type):
        return {"function": _registered_name(value, where)}
    raise ValueError(
        f"{where} is {shown(value)}, which cannot be stored as JSON; use numbers, strings, tuples, "
        "functions and frozen dataclasses of these"
    )


def _registered_name(own: Named, where: str) -> str:
    if _KNOWN.get(own.__qualname__) is own:
        return own.__qualname__
    if "<" in own.__qualname__ or ismethod(own):
        raise ValueError(
            f"{where} is {own.__qualname__} of {own.__module__}, which cannot be stored by name; "
            "define it with `def` or `class` at the top level of a module. Store its parameters in "
            "the fields of a frozen dataclass"
        )
    return f"{own.__module__}:{own.__qualname__}"


def from_json(content: Any, own: Iterable[Named], where: str, *, trust_code: bool = False) -> Any:
    """Converts JSON data from `to_json` back to the value.

    Args:
        content: The JSON data.
        own: The caller's classes and functions.
        where: The name of the value, for error messages.
        trust_code: Whether to import the classes and functions that `own` does not contain.

    Raises:
        ValueError: a class or function is unknown, or a class does not have the fields that the
            JSON data gives.
    """
    own = list(own)
    for x in own:
        if not (is_dataclass(x) if isinstance(x, type) else hasattr(x, "__qualname__")):
            raise ValueError(f"layers has {shown(x)}; its entries must be dataclasses or functions")
    return _read(content, own, where, trust_code)


def _read(content: Any, own: list[Named], where: str, trust_code: bool) -> Any:
    if isinstance(content, list):
        entries = enumerate(content)
        return tuple(_read(x, own, f"{where}[{i}]", trust_code) for i, x in entries)
    if not isinstance(content, dict):
        return content
    if "function" in content:
        return _found("function", str(content["function"]), own, where, trust_code)
    kind = _found("class", str(content.get("class")), own, where, trust_code)
    given = {x: y for x, y in content.items() if x != "class"}
    values = {x: _read(y, own, f"{where}.{x}", trust_code) for x, y in given.items()}
    names = [x.name for x in fields(kind)]
    if values.keys() != set(names):
        raise ValueError(
            f"{where} has the fields {', '.join(values)}, but the class {kind.__name__} has "
            f"{', '.join(names) or 'no fields'}"
        )
    try:
        return kind(**values)
    except (AttributeError, TypeError, ValueError) as error:  # A value has an invalid type.
        raise ValueError(f"{where}: {error}") from None


def _found(
    kind: Literal["class", "function"], name: str, own: list[Named], where: str, trust_code: bool
) -> Any:
    """Finds jaxformer's or the caller's class or function with the given name."""
    if kind == "class" and name in _KNOWN:
        return _KNOWN[name]
    module, _, plain = name.rpartition(":")
    of_kind = [x for x in dict.fromkeys(own) if isinstance(x, type) == (kind == "class")]
    named = [x for x in of_kind if x.__qualname__ == plain]
    found = [x for x in named if x.__module__ == module] or named
    if not found and trust_code:
        imported = import_named(kind, name, where)
        if kind == "class" and not is_dataclass(imported):
            raise ValueError(f"{where} is the class {name}; it must be a dataclass")
        return imported
    if not found:
        raise ValueError(
            f"{where} is the {kind} {name}, which is not part of jaxformer; pass the {kind}, as in "
            f"jf.load(folder, layers=[{plain}]), or import it with trust_code=True (--trust-code "
            "on the command line) if you trust the folder"
        )
    if len(found) > 1:
        raise ValueError(
            f"{where} is the {kind} {name}, but layers has {len(found)} of this name, none of them "
            "in this module"
        )
    return found[0]


def described(content: Any) -> str:
    """Formats the result of `to_json` for people, such as "my_layers:Memory(decay=0.9)"."""
    if isinstance(content, list):
        return f"({', '.join(map(described, content))})"
    if not isinstance(content, dict):
        return repr(content)
    if "function" in content:
        return str(content["function"])
    values = [f"{name}={described(x)}" for name, x in content.items() if name != "class"]
    return f"{content.get('class')}({', '.join(values)})"


def difference(where: str, then: Any, now: Any) -> tuple[str, str, str] | None:
    """Returns the first difference between two results of `to_json`, or None.

    Differences in module names are ignored.

    Args:
        where: The name of the compared value, such as "layers".
        then: The first result.
        now: The second result.

    Returns:
        (the name of the field or entry that differs, its value in `then`, its value in `now`).
    """
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        parts = [(f"{where}[{i}]", *x) for i, x in enumerate(zip(then, now, strict=True))]
    elif isinstance(then, dict) and isinstance(now, dict) and _plain(then) == _plain(now):
        names = [name for name in then | now if name not in ("class", "function")]
        parts = [(f"{where}.{name}", then.get(name), now.get(name)) for name in names]
    else:
        return None if then == now else (where, described(then), described(now))
    return next((found for x in parts if (found := difference(*x))), None)


def _plain(content: dict[str, Any]) -> tuple[str, ...]:
    """Returns (class name, function name) without the names of their modules."""
    return tuple(str(content.get(x)).rpartition(":")[2] for x in ("class", "function"))
