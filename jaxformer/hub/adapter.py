"""Reader for a LoRA adapter of Hugging Face's PEFT library in the folder of its model.

transformers loads such an adapter with the model. This module adds the adapter's updates to the
weights: W + scale · B A, with A stored as lora_A.weight [rank, inputs] and B as lora_B.weight
[outputs, rank].
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.files import read_json
from jaxformer.artifacts.tensors import Tensor, file_tensors
from jaxformer.hub.name_patterns import check_pattern, fully_matches
from jaxformer.hub.options import Options
from jaxformer.hub.table import TensorEntry

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options that only concern training or bookkeeping. PEFT derives `fan_in_fan_out` from the class of
# a layer, and the base model is the one in the same folder.
_HARMLESS = frozenset(
    """
    auto_mapping base_model_name_or_path fan_in_fan_out inference_mode lora_dropout megatron_core
    peft_version qalora_group_size revision task_type
    """.split()
)
_ALL = "all-linear"
_LAYER = re.compile(r"\.(\d+)(?=\.)")
_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """An adapter whose values are not read yet.

    Args:
        path: The file of its tensors.
        factors: {module: {"A": tensor, "B": tensor}}.
        scales: {module: scale of its update}.
        targets: The options that select modules.
    """

    path: Path
    factors: dict[str, dict[str, Tensor]]
    scales: dict[str, float]
    targets: "Targets"

    def applied(self, tensors: dict[str, Tensor], entries: list[TensorEntry], base: str) -> dict:
        """Returns the model's tensors by their names in the table, with the updates added.

        Args:
            tensors: The model's tensors.
            entries: The table entries that describe them.
            base: The prefix of tensor names that files of a bare model leave out.

        Raises:
            ValueError: If an update fits no weight of the model.
        """
        applied: dict[str, Tensor | Adapted] = dict(tensors)
        by_module = {x.theirs.removesuffix(".weight"): x for x in entries if is_map(x)}
        for module, factors in self.factors.items():
            entry = by_module.get(module, by_module.get(base + module))
            if entry is None:
                raise ValueError(f"{self.path}: the model has no linear map {module}")
            inputs, outputs = entry.layout.shape(entry.shapes)
            rank = factors["A"].shape[0]
            factors["A"].check((rank, inputs))
            factors["B"].check((outputs, rank))
            update = (factors["A"], factors["B"], self.scales[module], entry.is_transposed)
            applied[entry.theirs] = Adapted(tensors[entry.theirs], *update)
        self._warn_of_missing(
            module
            for module, entry in by_module.items()
            if applied[entry.theirs] is tensors[entry.theirs]
            and not entry.ours[0].startswith("head/")  # "all-linear" never selects the head
        )
        return applied

    def _warn_of_missing(self, unchanged: Iterable[str]) -> None:
        """Warns of modules that the config selects and the file lacks. PEFT warns too."""
        if missing := list(filter(self.targets.is_adapted, unchanged)):
            more = f" and {len(missing) - 1} more modules" if len(missing) > 1 else ""
            warnings.warn(
                f"{self.path} has no update of {missing[0]}{more}, although {CONFIG} selects it; "
                "its weights remain those of the model",
                stacklevel=2,
            )


class Adapted(NamedTuple):
    """A tensor of the model with its update. Like a `Tensor`, it can be checked and mapped.

    Args:
        tensor: The model's tensor.
        down: lora_A.
        up: lora_B.
        scale: The scale of the update.
        is_transposed: Whether the tensor is [outputs, inputs], as in most classes.
    """

    tensor: Tensor
    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the model's tensor has another shape."""
        self.tensor.check(shape)

    def mapped(self) -> np.ndarray:
        """Returns the updated values in float32."""
        up, down = (np.asarray(x.mapped(), np.float32) for x in (self.up, self.down))
        update = np.float32(self.scale) * (up @ down)
        return np.float32(self.tensor.mapped()) + (update if self.is_transposed else update.T)


def is_map(entry: TensorEntry) -> bool:
    """Returns whether the entry is the weight of one linear map, and not of all experts."""
    return entry.ours[0].endswith("/kernel") and len(entry.their_shape) == 2


def read_adapter_beside(folder: Path) -> Adapter | None:
    """Reads the adapter in the folder of a model. Returns None if there is none.

    Raises:
        ValueError: If the adapter is incomplete or has an option that is not implemented.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    options = Options(read_json(path), path)
    options.require({"peft_type": "LORA", "bias": "none"})
    if options.take("init_lora_weights", True) not in (True, False, "gaussian"):
        raise options.error("init_lora_weights", "it must be true, false or 'gaussian'")
    rank, alpha = options.whole("r", 8, least=1), options.number("lora_alpha", 8)
    ranks, alphas = (read_patterns(options, key) for key in ("rank_pattern", "alpha_pattern"))
    root = options.flag("use_rslora", False)
    targets = read_targets(options)
    options.nothing_left(_HARMLESS)
    weights = folder / TENSORS
    if not weights.is_file():
        raise ValueError(
            f"{path} describes an adapter, but {weights.name} does not exist; save the adapter as "
            "safetensors with PEFT, or remove the file to open the model without the adapter"
        )
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in file_tensors(weights).items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise ValueError(f"{weights}: tensor {name} is no lora_A or lora_B of a linear map")
        factors.setdefault(parts["module"], {})[parts["factor"]] = tensor
    scales = {}
    for module, both in factors.items():
        if both.keys() != {"A", "B"}:
            raise ValueError(f"{weights}: {module} has only one of lora_A and lora_B")
        if not targets.is_adapted(module):
            raise options.error(
                "target_modules",
                f"by this and the other options there is no update of {module}, which "
                f"{weights.name} has",
            )
        r = pattern_value(ranks, module, rank)
        if both["A"].shape[:1] != (r,):
            raise ValueError(f"{weights}: lora_A of {module} is {both['A'].shape}; r is {r}")
        scales[module] = pattern_value(alphas, module, alpha) / (r**0.5 if root else r)
    return Adapter(weights, factors, scales, targets)


# ---- which linear maps the options of an adapter select


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
