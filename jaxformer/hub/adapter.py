"""Reader for LoRA adapters of the PEFT library that are stored in the folder of their model.

Like transformers, jaxformer loads an adapter in a model's folder together with the model. This
module adds the adapter's updates to the weights: W + scale · B A. A is stored as lora_A.weight
[rank, inputs], and B as lora_B.weight [outputs, rank].
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
# Options that do not affect the outputs. PEFT derives `fan_in_fan_out` from the class of a layer.
# `base_model_name_or_path` is not needed, because the base model is in the same folder.
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
    """A LoRA adapter, with tensors whose values are not read yet.

    Args:
        path: The file with the adapter's tensors.
        factors: {module: {"A": tensor, "B": tensor}}.
        scales: {module: scale of the module's update}.
        targets: The options that select the adapted linear layers.
    """

    path: Path
    factors: dict[str, dict[str, Tensor]]
    scales: dict[str, float]
    targets: "Targets"

    def applied(self, tensors: dict[str, Tensor], entries: list[TensorEntry], base: str) -> dict:
        """Adds the updates to the model's tensors.

        Args:
            tensors: The model's tensors by their names (`TensorEntry.theirs`).
            entries: The `TensorEntry` of each tensor.
            base: A prefix of tensor names, such as "model."; files of a bare model omit it.

        Raises:
            ValueError: The adapter updates a linear layer that the model does not have.
        """
        applied: dict[str, Tensor | Adapted] = dict(tensors)
        by_module = {x.theirs.removesuffix(".weight"): x for x in entries if is_map(x)}
        for module, factors in self.factors.items():
            entry = by_module.get(module, by_module.get(base + module))
            if entry is None:
                raise ValueError(f"{self.path}: the model has no linear layer {module}")
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
            and not entry.ours[0].startswith("head/")  # "all-linear" never selects the head.
        )
        return applied

    def _warn_of_missing(self, unchanged: Iterable[str]) -> None:
        """Warns, like PEFT, if the file has no update of a layer that the config selects."""
        if missing := list(filter(self.targets.is_adapted, unchanged)):
            more = f" and {len(missing) - 1} more modules" if len(missing) > 1 else ""
            warnings.warn(
                f"{self.path} has no LoRA weights for {missing[0]}{more}, although {CONFIG} "
                "selects this part of the model, which therefore remains unchanged",
                stacklevel=2,
            )


class Adapted(NamedTuple):
    """A tensor of the model with a LoRA update, with the methods `check` and `mapped` of `Tensor`.

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
        """Raises ValueError unless the shape of the model's tensor is `shape`."""
        self.tensor.check(shape)

    def mapped(self) -> np.ndarray:
        """Returns the sum of the tensor and its update, in float32."""
        up, down = (np.asarray(x.mapped(), np.float32) for x in (self.up, self.down))
        update = np.float32(self.scale) * (up @ down)
        return np.float32(self.tensor.mapped()) + (update if self.is_transposed else update.T)


def is_map(entry: TensorEntry) -> bool:
    """Returns whether the entry is the weight of one linear layer, not the weights of experts."""
    return entry.ours[0].endswith("/kernel") and len(entry.their_shape) == 2


def read_adapter_beside(folder: Path) -> Adapter | None:
    """Reads the adapter in the folder of a model, or returns None if the folder has no adapter.

    Raises:
        ValueError: The adapter is incomplete or has an option that is not implemented.
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
            raise ValueError(
                f"{weights}: tensor {name} is not a lora_A or lora_B of a linear layer"
            )
        factors.setdefault(parts["module"], {})[parts["factor"]] = tensor
    scales = {}
    for module, both in factors.items():
        if both.keys() != {"A", "B"}:
            raise ValueError(f"{weights}: {module} has only one of lora_A and lora_B")
        if not targets.is_adapted(module):
            raise options.error(
                "target_modules",
                f"{weights.name} has LoRA weights for {module}, but {CONFIG} does not select this "
                "module",
            )
        r = pattern_value(ranks, module, rank)
        if both["A"].shape[:1] != (r,):
            raise ValueError(
                f"{weights}: lora_A of {module} has shape {both['A'].shape}, but {CONFIG} sets "
                f"rank {r}"
            )
        scales[module] = pattern_value(alphas, module, alpha) / (r**0.5 if root else r)
    return Adapter(weights, factors, scales, targets)


# ---- options of an adapter that select linear layers


@dataclass(frozen=True)
class Targets:
    """Options of an adapter's config that select the linear layers with an update.

    Attributes:
        modules: A regular expression that matches whole names, or a list of names and name
            suffixes.
        excluded: Names of linear layers that have no update, in the format of `modules`.
        layers: The indices of the adapted layers, or None for all layers.
        layer_lists: Regular expressions for the names of module lists, such as "layers". An index
            in `layers` selects an entry of each list whose name matches. If `layer_lists` is empty,
            the index selects an entry of every list.
    """

    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: frozenset[int] | None = None
    layer_lists: tuple[str, ...] = ()

    def is_adapted(self, module: str) -> bool:
        """Returns whether the options select a linear layer.

        Args:
            module: The layer's name in transformers, such as "model.layers.0.mlp.up_proj".
        """
        if _selects(self.excluded, module):
            return False
        if self.modules == _ALL:
            return True
        if not isinstance(self.modules, str) and module in self.modules:
            return True  # `layers` does not restrict a module that is listed by its full path.
        return _selects(self.modules, module) and self._is_layer_adapted(module)

    def _is_layer_adapted(self, module: str) -> bool:
        """Returns whether `layers` is None or contains the layer index in a module's name."""
        if self.layers is None:
            return True
        return next(self._layers(module), None) in self.layers

    def _layers(self, module: str) -> Iterator[int]:
        # Without `layers_pattern`, PEFT requires that the list of layers has a parent module, as in
        # "model.layers".
        for pattern in self.layer_lists or (r".*\.[^.]*",):
            for found in _LAYER.finditer(module):
                if fully_matches(rf"(.*\.)?({pattern})", module[: found.start()]):
                    yield int(found[1])


def read_targets(options: Options) -> Targets:
    """Reads the options that select linear layers.

    Raises:
        ValueError: An option has a value that PEFT does not accept.
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
        raise options.error(
            "layers_to_transform", "it must be the index of a layer, or a list of indices"
        )
    if isinstance(modules, str) and (layers or lists):
        key = "layers_to_transform" if layers else "layers_pattern"
        raise options.error(key, "PEFT accepts it only if target_modules is a list of names")
    return Targets(modules, excluded, frozenset(layers) if layers else None, tuple(lists))


def pattern_value(patterns: dict[str, float], module: str, default: float) -> float:
    """Returns the value of the first pattern that matches a module's name or a suffix of the name.

    A suffix starts after a dot, such as "up_proj" in "mlp.up_proj". If no pattern matches,
    `default` is returned.
    """
    matching = (key for key in patterns if fully_matches(rf"(.*\.)?({key})", module))
    return patterns.get(next(matching, ""), default)


def read_patterns(options: Options, key: str) -> dict[str, float]:
    """Reads an option that maps regular expressions for names to positive numbers."""
    numbers = options.mapping(key)
    for pattern, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise options.error(key, "it must map names of modules to positive numbers")
        _check(options, key, pattern)
    return numbers


def _names(options: Options, key: str, value: object) -> str | tuple[str, ...]:
    """Reads an option that is a regular expression or a list of names."""
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
