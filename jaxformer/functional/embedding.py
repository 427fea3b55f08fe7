"""Embeddings, which convert token ids or float features to vectors."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.dropout import dropout
from jaxformer.functional.hooks import HookPoints
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.norms import Norm, apply_norm
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.placement import Placement
from jaxformer.functional.position_vectors import LearnedPositions, PositionVectors
from jaxformer.functional.symbolic import nan_if_longer
from jaxformer.functional.tables import look_up
from jaxformer.functional.trees import Weights


def embed_tokens(
    weights: Weights,
    tokens: Shaped[Array, "batch length *dim"],
    dtype: DTypeLike,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Looks up the token vectors [*batch, length, dim] of ids; float inputs are only cast.

    The vector of an id outside the table is NaN.
    """
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        return look_up(weights["tokens"], tokens, dtype, placement)
    return tokens.astype(dtype)


def add_token_types(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    token_type_ids: Int[Array, "batch length"] | None,
    placement: Placement,
) -> Float[Array, "batch length dim"]:
    """Adds the vector of each token's type, if the weights have token types."""
    if "token_types" not in weights:
        return x
    if token_type_ids is None:
        return x + weights["token_types"][0].astype(x.dtype)
    return x + look_up(weights["token_types"], token_type_ids, x.dtype, placement)


def without_padding(
    x: Shaped[Array, "batch length dim"], segment_ids: Int[Array, "batch length"] | None
) -> Shaped[Array, "batch length dim"]:
    """Zeroes x at padding (segment id 0), so that padding does not influence any output."""
    return x if segment_ids is None else jnp.where((segment_ids != 0)[..., None], x, 0)


def embedding_stddev(dim: int, *, is_scaled: bool = False, passes_on: bool = False) -> float:
    """Returns the initial standard deviation of input vectors.

    The standard deviation is 1/√dim for vectors that are multiplied by √dim (`is_scaled`), and in
    models with neither a residual stream nor norms (`passes_on`). Otherwise it is 0.02. With
    1/√dim, logits have a magnitude of about 1.
    """
    return dim**-0.5 if is_scaled or passes_on else 0.02


@dataclass(frozen=True)
class InputVectors(ABC):
    """Base class of layers that convert the inputs of a model to vectors.

    Subclasses are frozen dataclasses with hashable fields. `Embedding` adds positions, and applies
    the norm and dropout.
    """

    @abstractmethod
    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns initial weights.

        Args:
            key: a random key.
            dim: number of features of a vector.
            stddev: standard deviation of the features of the vectors.
        """

    @abstractmethod
    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """Computes the vectors of `inputs.tokens` in `dtype`; padding may have any vector."""

    def units(self) -> tuple[int, ...]:
        """Returns the sizes of axes that tensor parallelism splits, such as the vocabulary."""
        return ()


@dataclass(frozen=True)
class TokenVectors(InputVectors):
    """A table of vectors, one for each token id.

    Attributes:
        vocab_size: number of token ids.
    """

    vocab_size: int

    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns initial token vectors from N(0, stddev²).

        A stddev of 0.02 (GPT-2) suits models with norms. Without a norm, a stddev of 1/√dim gives
        logits with a magnitude of about 1. With a stddev of 0.02, an LSTM barely starts to learn.
        `models.builders.recurrent` therefore uses 1/√dim, and enlarges the first layer's input
        kernel.
        """
        return {"tokens": stddev * jax.random.normal(key, (self.vocab_size, dim), jnp.float32)}

    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """See `embed_tokens`."""
        return embed_tokens(weights, inputs.tokens, dtype, placement)

    def units(self) -> tuple[int, ...]:
        """Returns the vocabulary size."""
        return (self.vocab_size,)


@dataclass(frozen=True)
class FeatureVectors(InputVectors):
    """A linear layer for float features, such as audio frames or image patches.

    Attributes:
        num_features: number of input features per position.
    """

    num_features: int

    def init(self, key: PRNGKeyArray, dim: int, stddev: float) -> Weights:
        """Returns W from N(0, stddev² / num_features), and b = 0.

        Input features of variance 1 result in vectors with standard deviation `stddev`.
        """
        return init_linear(key, self.num_features, dim, stddev=stddev / self.num_features**0.5)

    def __call__(
        self, weights: Weights, inputs: Inputs, dtype: DTypeLike, placement: Placement
    ) -> Float[Array, "batch length dim"]:
        """Computes x W + b. Padding is set to 0, so that NaN there cannot enter W's gradient."""
        return linear(weights, without_padding(inputs.tokens, inputs.segment_ids).astype(dtype))


@dataclass(frozen=True)
class Embedding:
    """Embedding of a model: input vectors plus position and type vectors, then a norm.

    Attributes:
        vectors: the layer from inputs to vectors.
        dim: number of features of a vector.
        max_length: maximum number of tokens per sequence.
        positions: position vectors, or None.
        num_token_types: number of token types.
        norm: the norm of the sum, or None.
        is_scaled: whether the vectors are multiplied by √dim (Vaswani et al. 2017, §3.4).
        stddev: standard deviation of the vectors at initialization.
        dtype: dtype of the vectors.
        dropout: dropout rate.
    """

    vectors: InputVectors
    dim: int
    max_length: int
    positions: PositionVectors | None = None
    num_token_types: int = 0
    norm: Norm | None = None
    is_scaled: bool = False
    stddev: float = 0.02
    dtype: str = "float32"
    dropout: float = 0.0

    def init(self, key: PRNGKeyArray) -> Weights:
        """Returns the initial weights, with position and type vectors from N(0, 0.02²)."""
        key, positions = jax.random.split(key)
        weights = dict(self.vectors.init(key, self.dim, self.stddev))
        if isinstance(self.positions, LearnedPositions):
            size = self.positions.length + self.positions.offset, self.dim
            weights["positions"] = 0.02 * jax.random.normal(positions, size, jnp.float32)
        if self.num_token_types:
            size, types = (self.num_token_types, self.dim), jax.random.fold_in(positions, 1)
            weights["token_types"] = 0.02 * jax.random.normal(types, size, jnp.float32)
        return weights

    def __call__(
        self,
        weights: Weights,
        inputs: Inputs,
        positions: Int[Array, "*batch length"],
        dropout_key: PRNGKeyArray | None,
        hook: HookPoints,
    ) -> Float[Array, "batch length dim"]:
        """Computes the vectors of the inputs. Before the norm, vectors at padding are set to 0.

        If the length is symbolic and exceeds `max_length` at run time, the vectors are NaN.

        Args:
            weights: the weights of the model, with the embedding in "embedding".
            inputs: the tokens or features.
            positions: the positions of the tokens.
            dropout_key: a random key, for training.
            hook: see `functional.hooks`.
        """
        tables, placement = weights["embedding"], hook.placement
        x = self.vectors(tables, inputs, self.dtype, placement)
        # With packed documents, the limit applies to each document and not to the sequence.
        if inputs.segment_ids is None:
            x = nan_if_longer(x, x.shape[1], self.max_length)
        if self.is_scaled:
            x = x * jnp.asarray(self.dim**0.5, x.dtype)
        if self.positions is not None:
            x = self.positions.add(tables, x, positions, placement)
        x = add_token_types(tables, x, inputs.token_type_ids, placement)
        x = without_padding(x, inputs.segment_ids)
        x = apply_norm(self.norm, weights, "embedding_norm", x, hook)
        return hook("embedding", dropout(dropout_key, x, self.dropout))
