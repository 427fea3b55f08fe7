"""Sub-layers as values: a function of the residual stream, with everything that depends on it.

A sub-layer is a frozen dataclass. Its fields are its sizes and options; its methods are what a
stack of layers needs to know about it. Nothing else asks which kind of sub-layer it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import SlotSize
from jaxformer.functional.inputs import Forward
from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.row_size import RowSize, product_flops
from jaxformer.functional.taps import NO_TAP, Tap
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

GATE_POWER = 0.2934  # E[σ(z)²] for z ~ N(0, 1)


# What an axis of weights is: features of the residual stream, features of heads, hidden features,
# or experts. None: the axis is not sharded.
WeightAxis = Literal["dim", "heads", "hidden", "experts"] | None


def axes_of_linear(
    inputs: WeightAxis, outputs: WeightAxis, *names: str
) -> dict[str, tuple[WeightAxis, ...]]:
    """Returns the axes of the kernels and biases of linear maps; see `SubLayer.weight_axes`."""
    axes: dict[str, tuple[WeightAxis, ...]] = {}
    for name in names:
        axes[f"{name}/kernel"] = inputs, outputs
        axes[f"{name}/bias"] = (None if outputs == "dim" else outputs,)
    return axes


class At(NamedTuple):
    """What a sub-layer reads besides its weights and x.

    Attributes:
        context: what the sub-layer's `context` returned for this pass: for attention, the mask and
            the positions of the keys. Equal sub-layers of all layers share it.
        state: the state of this layer after the earlier tokens; None: there are none.
        tap: captures and replaces the values at the sub-layer's points.
        keeps_states: whether to return the state after each token, [batch, length, …], instead of
            the last state only.
    """

    context: Any
    state: Any = None
    tap: Tap = NO_TAP
    keeps_states: bool = False


class Start(NamedTuple):
    """What the rows of a cache start from, before their first token.

    Attributes:
        batch_size: number of rows.
        dim: the number of features that the sub-layer reads.
        dtype: the dtype of activations.
        source: length and padding of the sources that the model has read; None: it reads none.
        encoded: the encoder's result for these; None: the model reads none.
        placement: where the values lie on devices.
    """

    batch_size: int
    dim: int
    dtype: str
    source: TokenInfo | None = None
    encoded: Forward | None = None
    placement: Placement = OneDevice()


class Output(NamedTuple):
    """What a sub-layer, or a part of a layer, returns.

    Attributes:
        x: the output.
        state: what later passes need of the tokens so far; None: nothing. For a part of a layer,
            by the name of the sub-layer.
        auxiliary: sums for the objective, by name, such as the balance loss of a router.
    """

    x: Float[Array, "*batch length dim"]
    state: Any = None
    auxiliary: dict[str, Array] = {}  # noqa: RUF012 (never changed)


@dataclass(frozen=True)
class Initial:
    """The size of the initial weights in a layer.

    With a residual, kernels are drawn from N(0, 0.02²). The standard deviation of kernels that
    write into the residual stream is 0.02/√(2 · num_layers), so that its variance does not grow
    with depth (GPT-2, Radford et al. 2019).

    Without a residual such kernels multiply the signal by less than 1 in each layer, and after four
    layers the gradients are 1e-14. Every kernel therefore preserves the variance of its input:
    W ~ N(0, 1 / fan_in), times 1 / E[act(z)²] after an activation (He et al. 2015).

    Attributes:
        num_layers: the number of layers of the stack; None: layers have no residual.
        is_normed: whether a norm stands between the sub-layers.
        input_stddev: the standard deviation of the layer's input.
    """

    num_layers: int | None
    is_normed: bool = True
    input_stddev: float = 1.0

    def reading(self, fan_in: int) -> float:
        """Returns the standard deviation of a kernel that reads features of variance 1."""
        return fan_in**-0.5 if self.num_layers is None else 0.02

    def writing(self, fan_in: int, power: float = 1.0) -> float:
        """Returns the standard deviation of a kernel that computes the output of a sub-layer.

        Args:
            fan_in: the number of features that the kernel reads.
            power: the mean square of these features.
        """
        if self.num_layers is None:
            return (power * fan_in) ** -0.5
        return 0.02 / (2 * self.num_layers) ** 0.5


@dataclass(frozen=True)
class SubLayer(ABC):
    """Base class of sub-layers. Subclasses are frozen dataclasses with hashable fields.

    Attributes:
        name: the name of its weights in a layer, which has one sub-layer of each name.
        points: the names of the values that can be captured or patched, in order.
    """

    name: ClassVar[str]
    points: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights for a residual stream of `dim` features."""

    @abstractmethod
    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes the function, the state after the tokens, and auxiliary sums."""

    def context(self, tokens: Tokens, shared: Weights) -> Any:
        """Returns what all layers with this sub-layer share in a pass; None: nothing.

        Args:
            tokens: the pass.
            shared: the weights of the model, of which all layers share some.
        """
        return None

    def prepare(self, weights: Weights) -> Weights:
        """Repacks the weights for decoding."""
        return weights

    def output_dim(self, dim: int) -> int:
        """Returns the number of features of the output; `dim` is that of the input."""
        return dim

    def slot_size(self) -> SlotSize | None:
        """Returns the size of the keys and values of a token; None: the cache keeps none."""
        return None

    def init_state(self, weights: Weights, start: Start) -> Any:
        """Returns what a layer keeps before the first token; None: it keeps nothing.

        A sub-layer that reads other tokens needs slots or a state to decode. A state is a tree of
        arrays, each with the batch as its first axis. `__call__` receives it in `at.state` and
        returns the state after the tokens, or after each of them if `at.keeps_states`.

        Args:
            weights: the weights of the sub-layer.
            start: the size of the cache, and the sources.
        """
        return None

    def rule(self) -> Mask | None:
        """Returns which other tokens an output depends on; None: on no other token."""
        return None

    def flops(self, weights: Weights, row: RowSize) -> int:
        """Returns the operations on one row: here, products of all matrices with all tokens.

        Args:
            weights: the weights of the sub-layer, or their shapes.
            row: the size of the row.
        """
        return product_flops(weights, row.length)

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """Returns what the axes of weights are, {path in the weights: one for each axis}.

        Meshes shard arrays by it. A kernel that is not named is sharded along its inputs, and a
        vector is not sharded.
        """
        return {}

    def units(self) -> tuple[int, ...]:
        """Returns numbers of units, such as heads, that tensor parallelism can divide."""
        return ()


def with_contexts(sublayers: Iterable[SubLayer], tokens: Tokens, shared: Weights) -> Tokens:
    """Returns the tokens with the context of each sub-layer; `shared` are the model's weights."""
    return replace(tokens, contexts={x: x.context(tokens, shared) for x in sublayers})
