"""Ordered tables from patterns of parameter paths to partitions over a mesh.

    fsdp     shards the parameters; a layer's parameters are gathered when it runs
    expert   shards the experts, which are computed where their parameters are
    tensor   shards the computation of a layer: heads, hidden features, vocabulary

References: Zhao et al. 2023 (fully sharded data parallelism), Shoeybi et al. 2019 (tensor
parallelism).
"""

from fnmatch import fnmatchcase
from typing import NamedTuple


class Rule(NamedTuple):
    """Partition of the parameters whose path matches a pattern.

    Attributes:
        pattern: a pattern of paths, "*" for anything.
        partition: the mesh axis, or axes, that shard each of an array's last axes; None: that axis
            is not sharded. The axes before, which are layers, are never sharded.
        num_axes: the number of axes that such an array has; None: any number.
    """

    pattern: str
    partition: tuple[str | tuple[str, ...] | None, ...]
    num_axes: int | None = None

    def matches(self, path: str, shape: tuple[int, ...]) -> bool:
        """Returns whether the rule is that of a parameter with this path and shape."""
        return fnmatchcase(path, self.pattern) and self.num_axes in (None, len(shape))


# Kernels that compute heads and hidden features are sharded by their outputs, kernels that read
# them by their inputs. In between there is no exchange over `tensor`.
_ENDS = (
    Rule("*embedding/tokens", ("tensor", "fsdp")),
    Rule("*embedding/*", (None, "fsdp")),
    Rule("head/kernel", ("fsdp", "tensor")),
    Rule("head/bias", ("tensor",)),
)
# Arrays of experts have the expert after the layer. Those of other feed-forward layers have the
# same paths, and one axis less.
_EXPERTS = (
    *(
        Rule(f"*feedforward/{name}/{part}", ("expert", *partition), 2 + len(partition))
        for name in ("up", "gate")
        for part, partition in (("kernel", ("fsdp", "tensor")), ("bias", ("tensor",)))
    ),
    Rule("*feedforward/down/kernel", ("expert", "tensor", "fsdp"), 4),
    Rule("*feedforward/down/bias", ("expert", None), 3),
)
_VECTORS = tuple(Rule(f"*/{name}", (None,)) for name in ("scale", "bias", "log_scale"))
TRANSFORMER = (
    *_ENDS,
    *_EXPERTS,
    *(
        Rule(f"*blocks/*/{name}/{part}", partition)
        for name in ("query", "key", "value", "input_gate", "output_gate", "up", "gate")
        for part, partition in (("kernel", ("fsdp", "tensor")), ("bias", ("tensor",)))
    ),
    Rule("*blocks/*/convolution/filter", (None, "tensor")),
    Rule("*blocks/*/convolution/bias", ("tensor",)),
    Rule("*blocks/*/output/kernel", ("tensor", "fsdp")),
    Rule("*blocks/*/down/kernel", ("tensor", "fsdp")),
    Rule("*blocks/*/sink", ("tensor",)),
    Rule("*relative_bias/table", (None, "tensor")),
    Rule("*/kernel", ("fsdp", None)),
    *_VECTORS,
)
# `tensor` shards only the two ends here: in between, a recurrent state would be exchanged at every
# step, and the features of a convolution at every layer.
ONLY_ENDS = (*_ENDS, Rule("*/kernel", ("fsdp", None)), *_VECTORS)
# Where `tensor` does not divide the heads or the words, the batch is sharded over it instead
# (`sharding.row_axes`). Parameters are then sharded over `tensor` as over `fsdp`.
_BOTH = ("fsdp", "tensor")


def whole_words(stack: str = "") -> tuple[Rule, ...]:
    """Returns rules for a stack, "" or "encoder/", whose vocabulary `tensor` does not divide."""
    return (
        Rule(f"{stack}embedding/tokens", (None, _BOTH)),
        Rule(f"{stack}head/kernel", (_BOTH, None)),
        Rule(f"{stack}head/bias", (None,)),
    )


def whole_heads(stack: str = "") -> tuple[Rule, ...]:
    """Returns rules for a stack whose heads `tensor` does not divide."""
    rules = [Rule(f"{stack}relative_bias/table", (None, None))]
    for name in (f"{stack}blocks/*attention", f"{stack}blocks/*gated_delta"):
        inputs = (f"{name}/{part}/kernel" for part in ("query", "key", "value", "gate"))
        rules += [Rule(pattern, (_BOTH, None)) for pattern in inputs]
        rules += [Rule(f"{name}/output/kernel", (None, _BOTH))]
        rules += [Rule(f"{name}/*/bias", (None,)), Rule(f"{name}/sink", (None,))]
        rules += [Rule(f"{name}/convolution/filter", (None, None))]
    return tuple(rules)
