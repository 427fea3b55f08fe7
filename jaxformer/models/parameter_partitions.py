"""Partitions of parameters over a mesh, from what each sub-layer says about its weights.

    fsdp     shards the parameters; a layer's parameters are gathered when it runs
    expert   shards the experts, which are computed where their parameters are
    tensor   shards the computation of a layer: heads, hidden features, vocabulary

Kernels that compute heads and hidden features are sharded by their outputs, kernels that read them
by their inputs. In between there is no exchange over `tensor`. Where `tensor` does not divide the
heads or the vocabulary, the batch is sharded over it instead (`MeshPlacement.of_stack`). Parameters
are then sharded over `tensor` as over `fsdp`.

Reference:
    Zhao et al. 2023 (fully sharded data parallelism), Shoeybi et al. 2019 (tensor parallelism).
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxformer.functional.layers.layer import sublayers_of
from jaxformer.functional.layers.sublayer import WeightAxis
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack

MeshAxes = str | tuple[str, ...] | None
_BOTH = ("fsdp", "tensor")
_DIVIDED: dict[WeightAxis, MeshAxes] = {
    "dim": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "experts": "expert",
    None: None,
}
_WHOLE = _DIVIDED | {"heads": None, "dim": _BOTH}


class Rule(NamedTuple):
    """Partition of the parameters whose path matches a pattern.

    Attributes:
        pattern: a pattern of paths, "*" for anything.
        partition: the mesh axis, or axes, that shard each of an array's last axes; None: that axis
            is not sharded. The axes before, which are layers, are never sharded.
    """

    pattern: str
    partition: tuple[MeshAxes, ...]

    def matches(self, path: str) -> bool:
        """Returns whether the rule is that of a parameter with this path."""
        return fnmatchcase(path, self.pattern)


_OTHERS = (
    Rule("*embedding/*", (None, "fsdp")),
    Rule("*/kernel", ("fsdp", None)),
    *(Rule(f"*/{name}", (None,)) for name in ("scale", "bias", "log_scale")),
)


def partition_rules(model: Model, tensor: int) -> tuple[Rule, ...]:
    """Returns the rules of a model's parameters; the first that matches a path applies.

    Args:
        model: the model.
        tensor: the size of the mesh axis of that name. It need not divide the heads or the
            vocabulary of the decoder or of the encoder.
    """
    encoder = [] if model.encoder is None else _rules_of_stack(model.encoder, tensor, "encoder/")
    return (*_rules_of_stack(model, tensor, ""), *encoder, *_OTHERS)


def _rules_of_stack(model: Model, tensor: int, prefix: str) -> Iterator[Rule]:
    words = _BOTH[::-1] if model.embedding.vocab_size % tensor == 0 else (None, _BOTH)
    yield Rule(f"{prefix}embedding/tokens", words)
    yield Rule(f"{prefix}head/kernel", words[::-1])
    yield Rule(f"{prefix}head/bias", words[:1])
    stack, divides = model.stack, not any(num % tensor for num in model.stack.units)
    yield Rule(f"{prefix}relative_bias/table", (None, "tensor" if divides else None))
    for path, axes in _axes_of_weights(stack):
        is_divided = divides or "heads" not in axes
        mesh_axes = [(_DIVIDED if is_divided else _WHOLE)[axis] for axis in axes]
        yield Rule(f"{prefix}blocks/{path}", tuple(mesh_axes))


def _axes_of_weights(stack: Stack) -> Iterator[tuple[str, tuple[WeightAxis, ...]]]:
    """Yields (path, axes) for the weights of which a sub-layer says the axes."""
    for numbers in stack.groups:
        group = f"{numbers[0]}/" if len(stack.groups) > 1 else ""
        for sublayer in sublayers_of(stack.layers[numbers[0]]):
            for path, axes in sublayer.weight_axes().items():
                yield f"{group}{sublayer.name}/{path}", axes
