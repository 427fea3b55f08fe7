"""Reports which attention implementation each layer uses on a device, and why."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxformer.doctor.targets import Target
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.fused_kernels import FusedKernel, first_supporting
from jaxformer.functional.attention.platforms import platform_kernels
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.layers.layer import layer_hook_points
from jaxformer.functional.model import Model
from jaxformer.functional.placement import OneDevice
from jaxformer.models.check import source_shape
from jaxformer.models.config import Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.parameters import shape_tree
from jaxformer.terminal import kind_of

GPU_GENERATION = 9  # All GPUs in `training.devices` are of the Hopper generation.


class Layers(NamedTuple):
    """Layers that use the same attention implementation.

    Attributes:
        batch: A description of the batch, such as "packed documents".
        part: The part of the model, such as "layers" or "cross-attention".
        numbers: The numbers of the layers, counted from 1.
        implementation: "blockwise", "explicit", "refused" or the name of a fused kernel. The value
            "refused" means that the settings require a fused kernel, but none supports the
            arguments.
        reason: The reason why no fused kernel is used, or None if a fused kernel is used.
    """

    batch: str
    part: str
    numbers: tuple[int, ...]
    implementation: str
    reason: str | None


# Each value is (name of the first fused kernel that supports a call of attention, or None; reasons
# why the kernels before it do not support the call).
KernelChoice = tuple[str | None, str]


@dataclass(frozen=True)
class Recorder:
    """Records which kernel supports each call of attention, without computing attention.

    Attributes:
        kernels: The kernels.
        calls: (name of the sub-layer, `KernelChoice`) of each recorded call.
    """

    kernels: tuple[FusedKernel, ...]
    calls: list[tuple[str, KernelChoice]] = field(default_factory=list, compare=False)
    name: str = "recorder"

    def unsupported_reason(self, query: Array, key: Array, value: Array, context: Context) -> None:
        """Records a call; see `FusedKernel`."""
        kernel, reason = first_supporting(self.kernels, query, key, value, context)
        choice = None if kernel is None else kernel.name, reason
        self.calls.append((context.name, choice))

    def attention(self, query: Array, key: Array, value: Array, context: Context) -> Array:
        """Returns zeros with the shape and dtype of the output."""
        return jax.numpy.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)


def explain_attention(
    config: ModelConfig, execution: Execution, target: Target, length: int
) -> list[Layers]:
    """Returns the attention implementation of each layer, for each type of batch.

    Args:
        config: The config of the model.
        execution: The execution settings.
        target: The devices.
        length: Tokens per sequence.

    Raises:
        ValueError: The model has no attention.
    """
    model, found = build(config), []
    config = model.config
    if not any(point.endswith("attention.weights") for point in model.layer_hook_points):
        raise ValueError(f"{kind_of(model)} has no attention layers to report")
    kernels = platform_kernels(target.platform, GPU_GENERATION)
    for batch, inputs in _inputs(config, length):
        recorder = Recorder(kernels)
        run = Run(
            replace(execution, layers="unrolled", remat="none", attention="auto"),
            placement=OneDevice((recorder,)),
            is_first=True,
        )
        _trace(model, inputs, run, is_cached=batch == PROMPTS)
        setting = (execution.for_decoding if batch == PROMPTS else execution).attention
        for part, numbers, choice in _by_part(recorder.calls, model.architecture):
            found.append(Layers(batch, part, numbers, *_implementation(choice, setting, target)))
    return found


def _implementation(choice: KernelChoice, setting: str, target: Target) -> tuple[str, str | None]:
    """Returns (implementation, reason); the reason is None for a fused kernel."""
    if setting in ("explicit", "blockwise"):
        return setting, f"attention is {setting!r} in the settings"
    kernel, unsupported = choice
    if kernel is not None:
        return kernel, None
    reason = unsupported or f"there is no fused kernel for {target.platform.upper()}s"
    return ("blockwise" if setting == "auto" else "refused"), reason


DENSE, PACKED, PROMPTS = "one document", "packed documents", "a prompt, read into a cache"


def _inputs(config: ModelConfig, length: int) -> Iterator[tuple[str, Inputs]]:
    tokens = jax.ShapeDtypeStruct((2, length), np.int32)
    source = source_shape(config, *tokens.shape)
    segment_ids = None if source is None else tokens
    yield DENSE, Inputs(tokens, source=source)
    yield PACKED, Inputs(tokens, tokens, None, source, segment_ids)
    if build(config).architecture.generates:
        yield PROMPTS, Inputs(tokens, tokens, None, source, segment_ids)


def _trace(model: LanguageModel, inputs: Inputs, run: Run, *, is_cached: bool) -> None:
    """Traces a forward pass; `run.placement` records the attention calls of this pass."""
    architecture = model.architecture

    def hidden(params: Any, inputs: Inputs) -> Any:
        if not is_cached:
            return architecture.forward(params, inputs, run).hidden
        weights = architecture.pack_weights(params)
        size = CacheSize(len(inputs.tokens), inputs.tokens.shape[1])
        source = inputs.source_inputs() if model.config.reads_source else None
        cache, _ = architecture.init_cache(weights, source, run, size)
        new = Inputs(inputs.tokens, inputs.segment_ids)
        return architecture.forward(weights, new, run, cache).hidden

    jax.eval_shape(hidden, shape_tree(model), inputs)


def _by_part(
    calls: list[tuple[str, KernelChoice]], model: Model
) -> Iterator[tuple[str, tuple[int, ...], KernelChoice]]:
    """Groups the attention calls of a forward pass by part of the model and by kernel.

    Yields:
        (part of the model, numbers of the layers counted from 1, `KernelChoice`).
    """
    stacks = {"layers": (model.stack, "attention")}
    stacks["cross-attention"] = model.stack, "cross_attention"
    if model.encoder is not None:
        stacks["encoder layers"] = model.encoder.stack, "attention"
    having = {
        part: [
            n
            for n, layer in enumerate(stack.layers)
            if f"{name}.weights" in layer_hook_points(layer)
        ]
        for part, (stack, name) in stacks.items()
    }
    num_encoder = len(having.get("encoder layers", ()))
    parts: dict[str, list[KernelChoice]] = {}
    for name, choice in calls:
        is_cross = name != "attention"
        in_encoder = len(parts.get("encoder layers", ())) < num_encoder and not is_cross
        part = "cross-attention" if is_cross else "encoder layers" if in_encoder else "layers"
        parts.setdefault(part, []).append(choice)
    for part, choices in parts.items():
        numbers, layers = having[part], stacks[part][0].layers
        order = list(range(len(numbers)))
        # In passes with a key/value cache, `run_layer` is jitted, so JAX traces it only once for
        # all layers with equal settings.
        if len(choices) < len(order):
            settings = list(dict.fromkeys(layers[number] for number in numbers))
            order = [settings.index(layers[number]) for number in numbers]
        by_choice: dict[KernelChoice, list[int]] = {}
        for number, call in zip(numbers, order, strict=True):
            by_choice.setdefault(choices[call], []).append(number + 1)
        for choice, some in by_choice.items():
            yield part, tuple(some), choice


def attention_rows(found: list[Layers]) -> list[tuple[str, ...]]:
    """Returns the table rows (layers, implementation, reason)."""
    lines: list[tuple[str, ...]] = []
    for batch, group in groupby(found, key=lambda layers: layers.batch):
        lines += [(), (batch, "", "")] if lines else [(batch, "", "")]
        for layers in group:
            label = f"  {layers.part} {_span(layers.numbers)}"
            lines.append((label, layers.implementation, layers.reason or ""))
    return lines


def _span(numbers: tuple[int, ...]) -> str:
    """Formats layer numbers: as 1–12, as 1, 3, … 11 for equal steps above 1, or as a list."""
    steps = set(np.diff(numbers))
    if len(numbers) < 3 or len(steps) > 1:
        return ", ".join(map(str, numbers))
    if steps == {1}:
        return f"{numbers[0]}–{numbers[-1]}"
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
