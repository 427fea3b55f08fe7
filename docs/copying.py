"""A small decoder that learns to repeat blocks of random tokens, for two pages of docs/.

python docs/copying.py    # trains it and prints its losses
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf
from jaxformer.functional import cross_entropy

VOCAB_SIZE, LENGTH, SHORTEST, LONGEST = 24, 32, 4, 12
CONFIG = jf.DecoderConfig(
    vocab_size=VOCAB_SIZE,
    max_length=LENGTH,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    positions="alibi",
    # The first layer attends only to the current token and the token before it.
    window=(2, None),
)
STEPS, BATCH_SIZE, EVERY = 500, 32, 50
MODEL, OPTIMIZER = jf.Decoder(CONFIG), optax.adam(4e-3)


class Checkpoint(NamedTuple):
    """The state of the model at one step of the training.

    Attributes:
        step: The number of completed training steps.
        variables: The variables of the model.
        loss: The loss of the last training step, or of the untrained model at step 0.
    """

    step: int
    variables: Any
    loss: float


def repeated_sequences(key, batch_size: int):
    """Returns sequences of 32 tokens that repeat a block of 4 to 12 random tokens."""

    def sequence(key):
        of_size, of_block = jax.random.split(key)
        size = jax.random.randint(of_size, (), SHORTEST, LONGEST + 1)
        block = jax.random.randint(of_block, (LONGEST,), 0, VOCAB_SIZE)
        return block[jnp.arange(LENGTH) % size]

    return jax.vmap(sequence)(jax.random.split(key, batch_size))


def loss(variables, tokens):
    return cross_entropy(MODEL.apply(variables, tokens[:, :-1]), tokens[:, 1:])


@partial(jax.jit, donate_argnums=0)
def train_some(state, keys):
    """Makes one update with each key in `keys`; returns the final state and the last loss."""

    def update(state, key):
        variables, moments = state
        value, gradient = jax.value_and_grad(loss)(variables, repeated_sequences(key, BATCH_SIZE))
        updates, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(variables, updates), moments), value

    state, losses = jax.lax.scan(update, state, keys)
    return state, losses[-1]


@cache
def trained() -> tuple[jf.Decoder, tuple[Checkpoint, ...]]:
    """Returns the trained model and its checkpoints. The first checkpoint is untrained."""
    variables = MODEL.init(jax.random.key(0), repeated_sequences(jax.random.key(1), 1))
    found = [
        Checkpoint(0, variables, float(loss(variables, repeated_sequences(jax.random.key(1), 64))))
    ]
    state = jax.tree.map(jnp.copy, (variables, OPTIMIZER.init(variables)))
    for step in range(EVERY, STEPS + 1, EVERY):
        state, value = train_some(state, jax.random.split(jax.random.key(step), EVERY))
        found.append(Checkpoint(step, jax.tree.map(jnp.copy, state[0]), float(value)))
    return MODEL, tuple(found)


if __name__ == "__main__":
    for checkpoint in trained()[1]:
        print(f"step {checkpoint.step}: {checkpoint.loss:.3f} nats per token")
