"""Output heads, which map hidden states to logits or to one vector per sequence."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from jaxformer.functional.layers.feedforward import Activation, activate
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.linear.affine import init_linear, linear, soft_cap, target_kernels
from jaxformer.functional.linear.kernels import for_small_steps
from jaxformer.functional.trees import Initializers, Weights


@dataclass(frozen=True)
class Head:
    """Output head of a model, a linear layer from hidden states to logits.

    Attributes:
        vocab_size: number of logits.
        dim: number of features of a hidden state.
        is_tied: whether the kernel is the transposed table of token vectors.
        use_bias: whether the head has a bias.
        softcap: soft cap of the logits, or None.
    """

    vocab_size: int
    dim: int
    is_tied: bool = True
    use_bias: bool = False
    softcap: float | None = None

    def initializers(self) -> Initializers:
        """Returns {"head": initializer}; {} for a tied head without bias."""
        size, use_bias = self.vocab_size, self.use_bias
        if not self.is_tied:
            return {"head": lambda key: init_linear(key, self.dim, size, use_bias=use_bias)}
        return {"head": lambda key: {"bias": jnp.zeros(size, jnp.float32)}} if use_bias else {}


def head(weights: Weights) -> Weights:
    """Returns the head's weights for `linear`; a tied kernel is the transposed token table."""
    output = weights.get("head", {})
    return output if "kernel" in output else {"kernel": weights["embedding"]["tokens"].T, **output}


def logits(
    weights: Weights, hidden: Float[Array, "*batch dim"], cap: float | None = None
) -> Float[Array, "*batch vocab"]:
    """Computes hidden W + b in float32, also for activations of another dtype.

    With a soft cap, each logit y is replaced by cap · tanh(y / cap).
    """
    return soft_cap(linear(head(weights), hidden, jnp.float32), cap)


def pack_kernels(tree: Any, dtype: DTypeLike, parts: int) -> Any:
    """Packs the kernels of all linear layers in a tree of weights for decoding.

    Kernels are cast to the compute dtype. Biases and norm weights remain float32, because norm
    statistics and logits are float32.

    Args:
        tree: a tree of weights.
        dtype: the compute dtype.
        parts: the number of parts of a packed kernel, one per CPU core.
    """
    return target_kernels(lambda kernel: for_small_steps(kernel, dtype, parts), tree)


@dataclass(frozen=True)
class Transform:
    """BERT's layer before the output head, Norm(act(W x + b)).

    Attributes:
        activation: the activation.
        norm: the norm, or None.
        use_bias: whether the linear layer has a bias.
    """

    activation: Activation
    norm: Norm | None
    use_bias: bool = True

    def initializers(self, dim: int) -> Initializers:
        """Returns {name of a part of the weights: its initializer}."""
        parts: Initializers = {
            "transform": lambda key: init_linear(key, dim, dim, use_bias=self.use_bias)
        }
        if (norm := self.norm) is not None:
            parts["transform_norm"] = lambda key: norm.init(dim)
        return parts

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes Norm(act(W x + b))."""
        x = activate(linear(weights["transform"], x), self.activation)
        return x if self.norm is None else self.norm(weights["transform_norm"], x)


@dataclass(frozen=True)
class Pooler:
    """BERT's pooler: one vector per sequence, tanh(W h + b), and an optional classifier.

    Here h is the hidden state of the first token that is not padding.

    Attributes:
        use_bias: whether the linear layer has a bias.
        num_labels: number of classes; 0 without a classifier.
    """

    use_bias: bool = True
    num_labels: int = 0

    def initializers(self, dim: int) -> Initializers:
        """Returns {name of a part of the weights: its initializer}."""
        parts: Initializers = {
            "pooler": lambda key: init_linear(key, dim, dim, use_bias=self.use_bias)
        }
        if self.num_labels:
            parts["classifier"] = lambda key: init_linear(key, dim, self.num_labels)
        return parts

    def __call__(
        self,
        weights: Weights,
        encoded: Float[Array, "batch length dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Computes the vector of each sequence."""
        is_first = jnp.zeros(encoded.shape[0], int)
        first = is_first if segment_ids is None else (segment_ids != 0).argmax(axis=1)
        first_vectors = jnp.take_along_axis(encoded, first[:, None, None], axis=1)[:, 0]
        return jnp.tanh(linear(weights["pooler"], first_vectors))

    def classify(
        self,
        weights: Weights,
        encoded: Float[Array, "batch length dim"],
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch labels"]:
        """Computes float32 logits of the classes of each sequence from its vector."""
        return linear(weights["classifier"], self(weights, encoded, segment_ids), jnp.float32)
