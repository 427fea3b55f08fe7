"""Which linear maps the config of a PEFT adapter selects."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxformer.hub.name_patterns import check_pattern, fully_matches
from jaxformer.hub.options import Options

_ALL = "all-linear"
_LAYER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class Targets:
    """Options of an adapter's config that select the linear maps with an update.

    Attributes:
        modules: A regular expression that matches whole names, or names and ends of names.
        excluded: The same for maps that have no update although `modules` selects them.
        layers: The numbers of the adapted layers; None: all layers.
        layer_lists: Regular expressions for the names of lists of layers; empty: any list.
    """

    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    layer_lists: tuple[str, ...] = ()

    def is_adapted(self, module: str) -> bool:
        """Returns whether the options select a linear map.

        Args:
            module: The map's name in the adapter's model, such as "model.layers.0.mlp.up_proj".
        """
        if _selects(self.excluded, module):
            return False
        if self.modules == _ALL:
            return True
        if not isinstance(self.modules, str) and module in self.modules:
            return True  # a whole name selects its map in any layer
        return _selects(self.modules, module) and self._is_layer_adapted(module)

    def _is_layer_adapted(self, module: str) -> bool:
        """Returns whether the first numbered list that fits `layer_lists` has an adapted layer."""
        if self.layers is None:
            return True
        return next(self._layers(module), None) in self.layers

    def _layers(self, module: str) -> Iterator[int]:
        # Without `layers_pattern`, PEFT requires a component before the name of the list.
        for pattern in self.layer_lists or (r".*\.[^.]*",):
            for found in _LAYER.finditer(module):
                if fully_matches(rf"(.*\.)?({pattern})", module[: found.start()]):
                    yield int(found[1])


def read_targets(options: Options) -> Targets:
    """Reads the options that select linear maps.

    Raises:
        ValueError: If one has a value that PEFT does not accept.
    """
    modules = _names(options, "target_modules", options.take("target_modules", None))
    modules = _ALL if isinstance(modules, str) and modules.lower() == _ALL else modules
    excluded = _names(options, "exclude_modules", options.take("exclude_modules", []))
    lists = options.take("layers_pattern", [])
    lists = _names(options, "layers_pattern", [lists] if isinstance(lists, str) else lists)
    for pattern in lists:
        _check(options, "layers_pattern", pattern)
    layers = options.take("layers_to_transform", [])
    layers = layers if isinstance(layers, list) else [layers]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise options.error("layers_to_transform", "it must be a number of a layer or a list")
    if isinstance(modules, str) and (layers or lists):
        key = "layers_to_transform" if layers else "layers_pattern"
        raise options.error(key, "PEFT accepts it only if target_modules is a list of names")
    return Targets(modules, excluded, frozenset(layers) if layers else None, tuple(lists))


def pattern_value(patterns: dict[str, float], module: str, default: float) -> float:
    """Returns the value of the first pattern that matches a name or its last components."""
    matching = (key for key in patterns if fully_matches(rf"(.*\.)?({key})", module))
    return patterns.get(next(matching, ""), default)


def read_patterns(options: Options, key: str) -> dict[str, float]:
    """Returns an option that maps regular expressions of names to positive numbers."""
    numbers = options.mapping(key)
    for pattern, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise options.error(key, "it must map names of modules to positive numbers")
        _check(options, key, pattern)
    return numbers


def _names(options: Options, key: str, value: object) -> str | tuple[str, ...]:
    """Returns an option that is a regular expression or a list of names."""
    if isinstance(value, str):
        _check(options, key, value)
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise options.error(key, "it must be a regular expression or a list of names")
    return tuple(value)


def _check(options: Options, key: str, pattern: str) -> None:
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise options.error(key, f"{pattern!r}: {error}") from None


def _selects(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return fully_matches(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)
