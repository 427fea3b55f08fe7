"""Values of frozen dataclasses as JSON: {"class": name, field: value, …}.

A folder names the classes of its values and never says where they are, so that reading one runs no
code of its choice. The library's classes are known; the caller passes their own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from jaxformer import functional
from jaxformer.functional.attention.masks import All, Near
from jaxformer.functional.attention.scores import Alibi, RelativePositions
from jaxformer.functional.layers.attention import Rotary
from jaxformer.functional.layers.cross_attention import LuongAttention
from jaxformer.functional.layers.norms import Unapplied
from jaxformer.models.config.check import shown
from jaxformer.models.config.transformer import RotaryScaling

_PUBLIC = """
    Attention Causal Convolution CrossAttention Experts FeedForward GatedDelta LayerNorm Lstm Packed
    Padding Parallel Prefix RMSNorm Recurrent Residual Rnn ShortConvolution Window
""".split()
_KNOWN = {
    kind.__name__: kind
    for kind in (
        *(All, Alibi, LuongAttention, Near, RelativePositions, Rotary, RotaryScaling, Unapplied),
        *(getattr(functional, name) for name in _PUBLIC),
    )
}


def to_json(value: Any, where: str) -> Any:
    """Returns a value in a form that JSON holds.

    Args:
        value: A frozen dataclass, a tuple, a number, a word, a truth value or None.
        where: The name of the value, for error messages.

    Raises:
        ValueError: The value, or one of its fields, is of another type.
    """
    if isinstance(value, tuple | list):
        return [to_json(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        own = {x.name: to_json(getattr(value, x.name), f"{where}.{x.name}") for x in fields(value)}
        return {"class": type(value).__name__, **own}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{where} is {shown(value)}, which a file cannot hold; use numbers, words, tuples and "
        "frozen dataclasses of these"
    )


def from_json(content: Any, classes: Iterable[type], where: str) -> Any:
    """Returns the value that `to_json` wrote.

    Args:
        content: The content of the file.
        classes: The caller's classes.
        where: The name of the value, for error messages.

    Raises:
        ValueError: A class is unknown, or its fields are others.
    """
    return _read(content, {**_KNOWN, **{kind.__name__: kind for kind in classes}}, where)


def _read(content: Any, classes: Mapping[str, type], where: str) -> Any:
    if isinstance(content, list):
        return tuple(_read(x, classes, f"{where}[{i}]") for i, x in enumerate(content))
    if not isinstance(content, dict):
        return content
    name = content.get("class")
    if name not in classes:
        raise ValueError(
            f"{where} is a {name}, which is no class of jaxformer's; pass it, as in "
            f"jf.load(folder, layers=[{name}])"
        )
    own = {x: _read(y, classes, f"{where}.{x}") for x, y in content.items() if x != "class"}
    names = [x.name for x in fields(classes[name])]
    if own.keys() != set(names):
        raise ValueError(
            f"{where} has the fields {', '.join(own)}; {name} has {', '.join(names) or 'none'}"
        )
    return classes[name](**own)
