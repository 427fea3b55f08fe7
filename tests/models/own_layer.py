"""A sub-layer that a user defines, with a state: the example of docs/library.md."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

import jaxformer as jf
from jaxformer.functional import Causal, LayerNorm, Output, Residual, SubLayer, init_linear, linear


@dataclass(frozen=True)
class Memory(SubLayer):
    """h_t = λ h_{t−1} + W x_t, from zero at the start of each document."""

    name = "memory"
    points = ("memory.hidden",)
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
        documents = at.context.segments
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
        return Output(at.tap("memory.hidden", hidden), states if at.keeps_states else state)


def with_memory(config, **options):
    """Returns the config's decoder with a memory in place of the attention of every other layer."""
    layers = jf.Decoder(config).architecture.stack.layers
    memory = Residual(Memory(), LayerNorm())
    layers = (x if i % 2 else (memory, *x[1:]) for i, x in enumerate(layers))
    return replace(jf.Decoder(config), layers=tuple(layers), **options)
