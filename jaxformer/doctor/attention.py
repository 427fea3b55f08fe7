"""Which attention runs in each layer of a model on a machine, and why no fused kernel does."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxformer.doctor.machines import Target
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.fused_kernels import FusedKernel, first_supporting
from jaxformer.functional.attention.platforms import kernels_of
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.layers.layer import layer_points
from jaxformer.functional.model import Model
from jaxformer.functional.placement import OneDevice
from jaxformer.models.config import Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.parameters import shape_tree

GPU_GENERATION = 9  # all GPUs of `training.devices` are of the Hopper generation


class Layers(NamedTuple):
    """Layers with the same attention.

    Attributes:
        rows: what the rows of the batch are.
        part: the part of the model, such as "layers" or "cross-attention".
        numbers: the numbers of the layers, from 1.
        implementation: the name of the kernel, "blockwise", "explicit" or, if the settings demand a
            fused kernel that does not support the arguments, "refused".
        reason: why it is not the fused kernel; None if it is.
    """

    rows: str
    part: str
    numbers: tuple[int, ...]
    implementation: str
    reason: str | None


# The name of the fused kernel of a call of attention, or None, and why no earlier one supports it.
KernelChoice = tuple[str | None, str]


@dataclass(frozen=True)
class Recorder:
    """Records which kernel supports each call of attention, and computes nothing.

    Attributes:
        kernels: the kernels.
        calls: for each call so far, the name of the point of its weights and the choice.
    """

    kernels: tuple[FusedKernel, ...]
    calls: list[tuple[str, KernelChoice]] = field(default_factory=list, compare=False)
    name: str = "recorder"

    def unsupported_reason(self, query: Array, key: Array, value: Array, context: Context) -> None:
        """Records a call; see `FusedKernel`."""
        kernel, reason = first_supporting(self.kernels, query, key, value, context)
        choice = None if kernel is None else kernel.name, reason
        self.calls.append((context.point, choice))

    def attention(self, query: Array, key: Array, value: Array, context: Context) -> Array:
        """Returns an array of the right shape."""
        return jax.numpy.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)


def explain_attention(
    config: ModelConfig, execution: Execution, target: Target, length: int
) -> list[Layers]:
    """Returns the attention of each layer, for each kind of rows.

    Args:
        config: the config of the model.
        execution: its execution settings.
        target: the machine.
        length: tokens per row.

    Raises:
        ValueError: the model has no attention.
    """
    model, found = build(config), []
    config = model.config
    if not any(point.endswith("attention.weights") for point in model.layer_points):
        raise ValueError(f"a {type(model).__name__} has no attention to explain")
    kernels = kernels_of(target.platform, GPU_GENERATION)
    for rows, inputs in _inputs(config, length):
        recorder = Recorder(kernels)
        run = Run(
            replace(execution, layers="unrolled", remat="none", attention="auto"),
            placement=OneDevice((recorder,)),
            is_first=True,
        )
        _trace(model, inputs, run, is_cached=rows == PROMPTS)
        setting = (execution.for_decoding if rows == PROMPTS else execution).attention
        for part, numbers, choice in _by_part(recorder.calls, model.architecture):
            found.append(Layers(rows, part, numbers, *_implementation(choice, setting, target)))
    return found


def _implementation(choice: KernelChoice, setting: str, target: Target) -> tuple[str, str | None]:
    """Returns the implementation that runs, and why it is not the fused kernel."""
    if setting in ("explicit", "blockwise"):
        return setting, f"attention is {setting!r} in the settings"
    kernel, unsupported = choice
    if kernel is not None:
        return kernel, None
    reason = unsupported or f"{target.platform.upper()}s have no fused kernel"
    return ("blockwise" if setting == "auto" else "refused"), reason


DENSE, PACKED, PROMPTS = "one document", "packed documents", "a prompt, read into a cache"


def _inputs(config: ModelConfig, length: int) -> Iterator[tuple[str, Inputs]]:
    tokens = jax.ShapeDtypeStruct((2, length), np.int32)
    source = tokens if config.reads_source else None
    yield DENSE, Inputs(tokens, source=source)
    yield PACKED, Inputs(tokens, tokens, None, source, source)
    if build(config).architecture.generates:
        yield PROMPTS, Inputs(tokens, tokens, None, source, source)


def _trace(model: LanguageModel, inputs: Inputs, run: Run, *, is_cached: bool) -> None:
    """Traces a pass, so that the placement of the run records its calls of attention."""
    architecture = model.architecture

    def hidden(params: Any, inputs: Inputs) -> Any:
        if not is_cached:
            return architecture.forward(params, inputs, run).hidden
        weights = architecture.prepare(params)
        size = CacheSize(len(inputs.tokens), inputs.tokens.shape[1])
        source = inputs.of_source() if model.config.reads_source else None
        cache, _ = architecture.start(weights, source, run, size)
        new = Inputs(inputs.tokens, inputs.segments)
        return architecture.forward(weights, new, run, cache).hidden

    jax.eval_shape(hidden, shape_tree(model), inputs)


def _by_part(
    calls: list[tuple[str, KernelChoice]], model: Model
) -> Iterator[tuple[str, tuple[int, ...], KernelChoice]]:
    """Groups the calls of a pass by part of the model and choice; yields the numbers of layers."""
    stacks = {"layers": (model.stack, "attention.weights")}
    stacks["cross-attention"] = model.stack, "cross_attention.weights"
    if model.encoder is not None:
        stacks["encoder layers"] = model.encoder.stack, "attention.weights"
    having = {
        part: [n for n, layer in enumerate(stack.layers) if point in layer_points(layer)]
        for part, (stack, point) in stacks.items()
    }
    num_encoder = len(having.get("encoder layers", ()))
    parts: dict[str, list[KernelChoice]] = {}
    for point, choice in calls:
        is_cross = point != "attention.weights"
        in_encoder = len(parts.get("encoder layers", ())) < num_encoder and not is_cross
        part = "cross-attention" if is_cross else "encoder layers" if in_encoder else "layers"
        parts.setdefault(part, []).append(choice)
    for part, choices in parts.items():
        numbers, layers = having[part], stacks[part][0].layers
        order = list(range(len(numbers)))
        if len(choices) < len(order):  # a pass over a cache traces equal layers once
            settings = list(dict.fromkeys(layers[number] for number in numbers))
            order = [settings.index(layers[number]) for number in numbers]
        by_choice: dict[KernelChoice, list[int]] = {}
        for number, call in zip(numbers, order, strict=True):
            by_choice.setdefault(choices[call], []).append(number + 1)
        for choice, some in by_choice.items():
            yield part, tuple(some), choice


def lines_of_attention(found: list[Layers]) -> list[tuple[str, ...]]:
    """Returns the lines of the table: (layers, implementation, reason)."""
    lines: list[tuple[str, ...]] = []
    for rows, group in groupby(found, key=lambda layers: layers.rows):
        lines += [(), (rows, "", "")] if lines else [(rows, "", "")]
        for layers in group:
            label = f"  {layers.part} {_span(layers.numbers)}"
            lines.append((label, layers.implementation, layers.reason or ""))
    return lines


def _span(numbers: tuple[int, ...]) -> str:
    """Returns the numbers as text: 1–12, or 1, 3, … 11 if they have a step."""
    steps = set(np.diff(numbers))
    if len(numbers) < 3 or len(steps) > 1:
        return ", ".join(map(str, numbers))
    if steps == {1}:
        return f"{numbers[0]}–{numbers[-1]}"
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
