"""Interface of sub-layers: functions of the residual stream, such as attention.

A sub-layer is a frozen dataclass, whose fields are sizes and options. The methods of a sub-layer
initialize the weights, compute the function, and return properties that decoding, sharding and FLOP
counts need. Other code uses only these methods and never checks the class of a sub-layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import KeyValueSize
from jaxformer.functional.hooks import NO_HOOK, HookPoints
from jaxformer.functional.inputs import Forward
from jaxformer.functional.linear.affine import Scalar
from jaxformer.functional.placement import OneDevice, Placement
from jaxformer.functional.sequence_size import SequenceSize, product_flops
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

GATE_POWER = 0.2934  # E[σ(z)²] for z ~ N(0, 1)


# What an axis of a weight enumerates: features of the residual stream, features of heads, hidden
# features, or experts. An axis with None is never sharded.
WeightAxis = Literal["dim", "heads", "hidden", "experts"] | None


def axes_of_linear(
    inputs: WeightAxis, outputs: WeightAxis, *names: str
) -> dict[str, tuple[WeightAxis, ...]]:
    """Returns the axes of kernels and biases of linear layers; see `SubLayer.weight_axes`."""
    axes: dict[str, tuple[WeightAxis, ...]] = {}
    for name in names:
        axes[f"{name}/kernel"] = inputs, outputs
        axes[f"{name}/bias"] = (None if outputs == "dim" else outputs,)
    return axes


class At(NamedTuple):
    """Arguments of a sub-layer besides its weights and its input x.

    Attributes:
        context: the result of the sub-layer's `context` method for this pass, such as the mask and
            the positions of the keys for attention. The context is computed once for all layers
            with equal sub-layers.
        state: the state of this sub-layer after the earlier tokens; None if there is no cache.
        hook: captures or replaces values at the hook points of the sub-layer.
        keeps_states: whether to return the state after each token, [batch, length, …], instead of
            only the last state.
    """

    context: Any
    state: Any = None
    hook: HookPoints = NO_HOOK
    keeps_states: bool = False


class Start(NamedTuple):
    """Arguments of `SubLayer.init_state`: sizes and sources of an empty cache.

    Attributes:
        batch_size: the batch size of the cache.
        dim: the number of input features of the sub-layer.
        dtype: the dtype of activations.
        source: length and padding of the sources; None for a model without a source.
        encoded: the encoder's output for the sources; None for a model without a source.
        placement: how arrays are sharded over devices.
    """

    batch_size: int
    dim: int
    dtype: str
    source: TokenInfo | None = None
    encoded: Forward | None = None
    placement: Placement = OneDevice()


class Output(NamedTuple):
    """Result of a sub-layer, or of a part of a layer.

    Attributes:
        x: the output.
        state: the state after the tokens, for the cache; None for a sub-layer without a state. A
            part of a layer, such as `Residual`, returns {name of the sub-layer: state}.
        auxiliary: terms of the training objective, by name, such as the balance loss of a router.
    """

    x: Float[Array, "*batch length dim"]
    state: Any = None
    auxiliary: dict[str, Array] = {}  # noqa: RUF012 (never changed)


@dataclass(frozen=True)
class Initial:
    """Standard deviations of the initial weights of a layer.

    Kernels are drawn from N(0, 0.02²). Kernels whose output is added to the residual stream have
    the standard deviation 0.02/√(2 · num_layers). The variance of the residual stream therefore
    does not grow with depth (GPT-2, Radford et al. 2019). Layers without a residual use
    `plain.Preserving`.

    Attributes:
        num_layers: the number of layers of the stack.
        input_stddev: the standard deviation of the layer's input.
        gate_power: the mean square of the features that a gate multiplies.
    """

    num_layers: int
    input_stddev: float = 1.0
    gate_power: float = 1.0

    def reading(self, fan_in: int) -> float:
        """Returns the standard deviation of a kernel whose input has variance 1."""
        return 0.02

    def writing(self, fan_in: int) -> float:
        """Returns the standard deviation of a kernel that computes the output of a sub-layer.

        `fan_in` is the number of input features of the kernel. If the inputs have the mean square p
        instead of 1, multiply the result by `gain(p)`.
        """
        return 0.02 / (2 * self.num_layers) ** 0.5

    def gain(self, power: Scalar) -> Scalar:
        """Returns the factor that corrects `writing(fan_in)` for inputs of mean square `power`."""
        return 1.0


@dataclass(frozen=True)
class SubLayer(ABC):
    """Base class of sub-layers. Subclasses are frozen dataclasses with hashable fields.

    Attributes:
        name: the sub-layer's key in the weights of its layer. Sub-layers of a layer have distinct
            names.
        hook_points: the names of its hook points, in order of computation.
    """

    name: ClassVar[str]
    hook_points: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights for a residual stream of `dim` features."""

    @abstractmethod
    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes the output, the state after the tokens, and terms of the training objective."""

    def context(self, tokens: Tokens, shared: Weights) -> Any:
        """Computes `At.context` for a forward pass, once for all layers with equal sub-layers.

        Args:
            tokens: the tokens of the forward pass.
            shared: the weights of the model, including the weights that all layers share.
        """
        return None

    def pack_weights(self, weights: Weights) -> Weights:
        """Repacks the weights for decoding."""
        return weights

    def output_dim(self, dim: int) -> int:
        """Returns the number of output features for `dim` input features."""
        return dim

    def key_value_size(self) -> KeyValueSize | None:
        """Returns the size of the keys and values cached per token; None without cached keys."""
        return None

    def init_state(self, weights: Weights, start: Start) -> Any:
        """Returns the state of the sub-layer before the first token, or None.

        To decode, a sub-layer that reads other tokens needs cached keys and values
        (`key_value_size`) or a state. A state is a tree of arrays with the batch as first axis.
        `__call__` receives the state in `at.state` and returns the state after the tokens. If
        `at.keeps_states` is True, `__call__` returns the state after each token.

        Args:
            weights: the weights of the sub-layer.
            start: the sizes of the cache, and the sources.
        """
        return None

    def rule(self) -> Mask | None:
        """Returns a mask of the tokens that each output depends on.

        None means that each output depends only on its own token.
        """
        return None

    def flops(self, weights: Weights, size: SequenceSize) -> int:
        """Returns the FLOPs for one sequence; by default, 2 per matrix element and token.

        Args:
            weights: the weights of the sub-layer, or their shapes.
            size: the number of tokens and the other sizes of the sequence.
        """
        return product_flops(weights, size.length)

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """Returns {path of a weight: what each of its axes enumerates}; see `WeightAxis`.

        On a mesh, the axes of a weight determine how the weight is sharded. Kernels that are
        missing in the dictionary are sharded along their input axis, and missing vectors are
        replicated.
        """
        return {}

    def units(self) -> tuple[int, ...]:
        """Returns the numbers of heads or other units that tensor parallelism distributes."""
        return ()

    def chosen_experts(self) -> int:
        """Returns the number of experts that process each token; 0 without experts.

        `weight_axes` marks the axis of experts as "experts". The command `doctor` checks that a
        compiled program runs only the chosen experts.
        """
        return 0


def with_contexts(sublayers: Iterable[SubLayer], tokens: Tokens, shared: Weights) -> Tokens:
    """Returns `tokens` with the context of each sub-layer; `shared` holds the model's weights."""
    return replace(tokens, contexts={x: x.context(tokens, shared) for x in sublayers})
