"""Reader for a LoRA adapter of Hugging Face's PEFT library in the folder of its model.

transformers loads such an adapter with the model. This module adds the adapter's updates to the
weights: W + scale · B A, with A stored as lora_A.weight [rank, inputs] and B as lora_B.weight
[outputs, rank].
"""

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.files import read_json
from jaxformer.artifacts.tensors import Tensor, file_tensors
from jaxformer.hub.adapter_targets import pattern_value, read_patterns, read_targets
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
_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """An adapter whose values are not read yet.

    Args:
        path: The file of its tensors.
        factors: {module: {"A": tensor, "B": tensor}}.
        scales: {module: scale of its update}.
        is_adapted: Whether the adapter's config selects a module.
    """

    path: Path
    factors: dict[str, dict[str, Tensor]]
    scales: dict[str, float]
    is_adapted: Callable[[str], bool]

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
        if missing := list(filter(self.is_adapted, unchanged)):
            more = f" and {len(missing) - 1} more modules" if len(missing) > 1 else ""
            warnings.warn(
                f"{self.path} has no update of {missing[0]}{more}, although {CONFIG} selects it; "
                "its weights remain those of the model",
                stacklevel=2,
            )


class Adapted(NamedTuple):
    """A tensor of the model with its update. It has the methods of `Tensor` that reading needs.

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

    def read_into(self, array: np.ndarray) -> None:
        """Copies the updated values into `array`."""
        array[...] = self.mapped()

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
    return Adapter(weights, factors, scales, targets.is_adapted)
