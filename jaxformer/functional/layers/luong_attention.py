"""Attention of a recurrent decoder to its source.

    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      tanh(W [a_t; h_t] + b)

h_t is the decoder's state and e_j the encoder's (Bahdanau et al. 2015; in this form, Luong et al.
2015). Without attention the encoder's last state, which has a fixed size, must represent the whole
source.

Reference:
    Notes, lecture 10 §1–2.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.attend import KeysValues, attend
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.layers.cross_attention import ReadsSource
from jaxformer.functional.layers.sublayer import At, Initial, Output
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.trees import Weights


@dataclass(frozen=True)
class LuongAttention(ReadsSource):
    """Attention by the states of a decoder to those of its encoder, which have the same width."""

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns K and V ~ N(0, 1/dim), and "output", the map W of [a; h], ~ N(0, 1/(2 dim))."""
        keys = jax.random.split(key, 3)
        return {
            "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
            "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
            "output": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
        }

    def scores(self) -> Scores:
        """Returns scores without a factor, as in the lecture."""
        return Scores(scale=1.0)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes tanh(W [a; h] + b), where a is the result of attention by h to the source."""
        tap, (keys, values) = at.tap, self.read(weights, at)
        hidden = tap("cross_attention.input", x)
        query = tap("cross_attention.query", hidden[:, None])
        heads = attend(query, keys, values, at.context.attention, tap)
        attended = tap("cross_attention.heads", heads)[:, 0]
        both = jnp.concatenate([attended, hidden], axis=-1)
        return Output(tap("cross_attention.output", jnp.tanh(linear(weights["output"], both))))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes (K e, V e), each with one head, [batch, 1, source, dim]."""
        return linear(weights["key"], encoded)[:, None], linear(weights["value"], encoded)[:, None]
