# %% [markdown]
# # Induction heads: find them, and break them
#
# Complete the functions: replace each `raise NotImplementedError` by your code. Use only NumPy, `jax.numpy`
# and the functions of jaxformer that an exercise names.
#
# `pytest docs/exercises --student docs/exercises/induction-heads.ipynb` grades this notebook. The lesson
# `docs/induction-heads.md` explains what an induction head does.

# %%
# If jaxformer is not installed, this cell installs it from the clone that contains this notebook. On Colab,
# upload the clone first, and write its folder here, such as "/content/jaxformer".
CLONE = "../.."
try:
    import jaxformer  # noqa: F401
except ImportError:
    from pathlib import Path

    if not Path(CLONE, "jaxformer", "__init__.py").is_file():
        raise FileNotFoundError(
            f"CLONE is {CLONE!r}, but {Path(CLONE).resolve()} is not a clone of jaxformer; "
            "set CLONE to the folder of your clone"
        ) from None
    pass  # %pip install --quiet {CLONE}

# %%
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf

# %% [markdown]
# ## A model that copies
#
# In half a minute, this cell trains a decoder of two layers on repeated blocks of random tokens. The first
# layer attends only to the current and the previous token. The model has no other information about positions.

# %%
config = jf.DecoderConfig(
    vocab_size=24,
    max_length=32,
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    positions="none",
    window=(2, None),
)
model, optimizer = jf.Decoder(config), optax.adam(4e-3)


def repeated_blocks(key, num_sequences):
    """Returns int [num_sequences, 32]; each sequence repeats a block of 4 to 12 random tokens."""

    def sequence(key):
        of_size, of_block = jax.random.split(key)
        size = jax.random.randint(of_size, (), 4, 13)
        return jax.random.randint(of_block, (12,), 0, 24)[jnp.arange(32) % size]

    return jax.vmap(sequence)(jax.random.split(key, num_sequences))


def training_loss(variables, tokens):
    log_probs = jax.nn.log_softmax(model.apply(variables, tokens[:, :-1]))
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def train(variables):
    def update(state, key):
        variables, moments = state
        gradient = jax.grad(training_loss)(variables, repeated_blocks(key, 32))
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(variables, updates), moments), None

    keys = jax.random.split(jax.random.key(0), 500)
    return jax.lax.scan(update, (variables, optimizer.init(variables)), keys)[0][0]


variables = train(model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))


def two_copies(key, num_sequences, size=10):
    """Returns int [num_sequences, 2 * size]; each sequence has two copies of a random block."""
    block = jax.random.randint(key, (num_sequences, size), 0, 24)
    return jnp.concatenate([block, block], axis=1)


# %% [markdown]
# ## 1. The loss of each copy (2 points)
#
# Row t of `logits` predicts token t + 1. Return two means of −log P: over the tokens of the first copy,
# and over the tokens of the second copy. Leave out the first token of each copy: nothing predicts the
# first token of the text, and the model cannot know where the second copy begins.


# %%
def copy_losses(logits, tokens):
    """Returns (first, second); logits is [n, 2 size, vocab], and tokens is int [n, 2 size]."""
    # solution
    size = tokens.shape[1] // 2
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    return losses[:, : size - 1].mean(), losses[:, size:].mean()
    # end


# %% [markdown]
# ## 2. Heads that attend to the previous token (1 point)
#
# `jf.inspect(model, variables, tokens, capture=("attention.weights",)).captured["attention.weights"]`
# contains the attention weights [layers, n, heads, length, length]. Return the mean weight on the
# previous token, over all tokens except the first token of each text.


# %%
def previous_token_scores(weights):
    """Returns [layers, heads]; weights is [layers, n, heads, length, length]."""
    # solution
    return jnp.diagonal(weights, -1, -2, -1).mean((1, 3))
    # end


# %% [markdown]
# ## 3. Heads that attend to the token after an earlier copy (2 points)
#
# The weights belong to texts with two copies of `size` tokens, so length is 2 size. The token at a position
# t of the second copy also occurs at position t − size. Return the mean weight on position t − size + 1,
# over all positions t of the second copy.


# %%
def induction_scores(weights):
    """Returns [layers, heads]; weights is [layers, n, heads, length, length]."""
    # solution
    size = weights.shape[-1] // 2
    return jnp.diagonal(weights, 1 - size, -2, -1)[..., 1:].mean((1, 3))
    # end


# %% [markdown]
# ## 4. The losses without a head (2 points)
#
# A high score does not prove that a head matters. `scaled_heads(factors)` is an edit that multiplies the
# output of each head by its factor. For each head, set the output of this head alone to zero, and compute the
# losses of both copies.


# %%
def scale(value, at, factors):
    return value * factors[at.layer][:, None, None]


def scaled_heads(factors):
    """Returns a patch for `jf.inspect(…, patch=patch)`; factors is [layers, heads]."""
    return {"attention.heads": jf.Edit(scale, factors)}


def losses_without_heads(model, variables, tokens):
    """Returns [2, layers, heads]: the losses of the first copy, and the losses of the second copy."""
    # solution
    shape = model.config.num_layers, model.config.num_heads
    losses = np.zeros((2, *shape))
    for head in np.ndindex(*shape):
        patch = scaled_heads(jnp.ones(shape).at[head].set(0))
        logits = jf.inspect(model, variables, tokens, patch=patch).logits
        losses[:, *head] = copy_losses(logits, tokens)
    return losses
    # end


# %% [markdown]
# ## 5. Break induction by an edit (3 points)
#
# Return a patch of the hook point "attention.heads" that changes a single head. With the patch, the model
# must no longer copy, but it must predict the first copy and random tokens as well as before. Choose the head
# by measurements, because the grader also calls the function with a model whose heads are in another order.
# The two induction heads can replace each other, so consider all heads.


# %%
def break_induction(model, variables, tokens):
    """Returns {"attention.heads": edit}; tokens is int [n, 2 size], two copies of `size` tokens."""
    # solution
    before = copy_losses(jf.inspect(model, variables, tokens).logits, tokens)
    first, second = losses_without_heads(model, variables, tokens)
    harmless = np.where(first < before[0] + 0.05, second, 0)
    head = np.unravel_index(harmless.argmax(), harmless.shape)
    return scaled_heads(jnp.ones(harmless.shape).at[head].set(0))
    # end


# %% [markdown]
# ## 6. Break induction without an edit (2 points)
#
# Change the config instead, with `dataclasses.replace`. Do not change the parameters. Again, the model must
# no longer copy, but it must predict the first copy and random tokens as well as before.


# %%
def config_without_induction(config):
    """Returns a `jf.DecoderConfig`; `jf.Decoder` with it must accept the trained variables."""
    # solution
    return replace(config, window=(2, 4))  # The earlier copy is more than 4 tokens away.
    # end
