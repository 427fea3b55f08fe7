"""A sub-layer that a user defines, with a state: the example of docs/own-parts.md."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import jaxformer as jf
from jaxformer.functional import (
    Attention,
    Causal,
    FeedForward,
    LayerNorm,
    Mask,
    Output,
    Residual,
    SubLayer,
    init_linear,
    linear,
)


@dataclass(frozen=True)
class Memory(SubLayer):
    """h_t = λ h_{t−1} + W x_t, from zero at the start of each document."""

    name = "memory"
    hook_points = ("memory.hidden",)
    decay: float = 0.9

    def init(self, key, dim, initial):
        return {"input": init_linear(key, dim, dim, stddev=initial.writing(dim))}

    def init_state(self, weights, start):
        return jnp.zeros((start.batch_size, start.dim), jnp.float32)

    def rule(self):
        return Causal()

    def context(self, tokens, shared):
        return tokens.new  # the positions and documents of the tokens

    def __call__(self, weights, x, at):
        begins = jnp.broadcast_to(at.context.position_ids() == 0, x.shape[:2])
        documents = at.context.segment_ids
        is_real = jnp.ones(x.shape[:2], bool) if documents is None else documents != 0
        state = jnp.zeros((len(x), x.shape[-1]), jnp.float32) if at.state is None else at.state

        def step(state, inputs):
            read, begins, is_real = inputs
            new = self.decay * jnp.where(begins[:, None], 0, state) + read
            state = jnp.where(is_real[:, None], new, state)
            return state, state

        read = linear(weights["input"], x, jnp.float32)
        by_time = (read.swapaxes(0, 1), begins.T, is_real.T)
        state, states = jax.lax.scan(step, state, by_time)
        states = states.swapaxes(0, 1)
        hidden = jnp.where(is_real[..., None], states, 0).astype(x.dtype)
        return Output(at.hook("memory.hidden", hidden), states if at.keeps_states else state)


def with_memory(config, **options):
    """Returns the config's decoder with a memory in place of the attention of every other layer."""
    layers = jf.Decoder(config).architecture.stack.layers
    memory = Residual(Memory(), LayerNorm())
    layers = (x if i % 2 else (memory, *x[1:]) for i, x in enumerate(layers))
    return replace(jf.Decoder(config), layers=tuple(layers), **options)


def snake(x):
    """Computes x + sin²(x) (Ziyin et al. 2020)."""
    return x + jnp.sin(x) ** 2


@dataclass(frozen=True)
class Bend:
    """max(x, slope · x): an activation with a field."""

    slope: float

    def __call__(self, x):
        return jnp.maximum(x, self.slope * x)


@dataclass(frozen=True)
class Strided(Mask):
    """Lets a query see every `stride`-th key, counted from itself."""

    stride: int

    def __call__(self, query, key):
        distance = query.position_ids()[..., :, None] - key.position_ids()[..., None, :]
        return distance % self.stride == 0


def with_own_values(config):
    """Returns the config's decoder with masks and activations of the user in its layers."""
    layers = (
        (
            Residual(Attention(4, 4, 2, mask=Causal() & Strided(2 + i % 2)), LayerNorm()),
            Residual(FeedForward(12, snake if i % 2 else Bend(0.1)), LayerNorm()),
        )
        for i in range(config.num_layers)
    )
    return jf.Decoder(config, layers=tuple(layers))
