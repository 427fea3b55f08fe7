# %% [markdown]
# # Lecture 11: the whole decoder
#
# Complete the functions: replace each `raise NotImplementedError` by your code. Use only `jax.numpy`,
# unless an exercise names another function. Vectors are the rows of a matrix: x is [m, d], with one row
# for each word.
#
# `pytest docs/exercises --student docs/exercises/lecture-11.ipynb` grades this notebook. The lesson
# `docs/lecture-11.md` explains the formulas.

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
import jax
import jax.numpy as jnp

from jaxformer.functional import scaled_dot_product_attention

# %% [markdown]
# ## 1. Layer normalisation (2 points)
#
# Compute γ (z − μ) / √(σ² + ε) + β, where μ and σ² are the mean and the population variance over the
# features of each row.


# %%
def layer_norm(z, gamma, beta, epsilon=1e-5):
    """Returns [m, d]; z is [m, d], and gamma and beta are [d]."""
    # solution
    mean = z.mean(axis=-1, keepdims=True)
    variance = ((z - mean) ** 2).mean(axis=-1, keepdims=True)
    return gamma * (z - mean) / jnp.sqrt(variance + epsilon) + beta
    # end


# %% [markdown]
# ## 2. Two positions of the norm (2 points)
#
# Post-norm computes LN(x + F(x)), and pre-norm computes x + F(LN(x)). Here `function` is F and `norm`
# is LN.


# %%
def post_norm(x, function, norm):
    """Returns [m, d]; function and norm map [m, d] to [m, d]."""
    # solution
    return norm(x + function(x))
    # end


def pre_norm(x, function, norm):
    """Returns [m, d]; function and norm map [m, d] to [m, d]."""
    # solution
    return x + function(norm(x))
    # end


# %% [markdown]
# ## 3. Heads (2 points)
#
# Split the features of each word into heads, and merge the heads again. Head h gets the features
# h · d/H … (h + 1) · d/H − 1.


# %%
def split_heads(x, num_heads):
    """Returns [num_heads, m, d / num_heads]; x is [m, d]."""
    # solution
    return x.reshape(len(x), num_heads, -1).swapaxes(0, 1)
    # end


def merge_heads(heads):
    """Returns [m, num_heads * head_dim]; heads is [num_heads, m, head_dim]."""
    # solution
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
    # end


# %% [markdown]
# ## 4. Multi-head attention with a causal mask (3 points)
#
# Compute queries, keys and values, split them into heads, let each head attend with the scale
# 1/√(d/H), merge the heads and multiply by W_O. You may use `scaled_dot_product_attention(query, key,
# value, mask)`, which takes arrays [heads, m, head_dim].


# %%
def multi_head_attention(x, W_Q, W_K, W_V, W_O, num_heads):
    """Returns [m, d]; x is [m, d], and each matrix is [d, d]."""
    # solution
    query, key, value = (split_heads(x @ W, num_heads) for W in (W_Q, W_K, W_V))
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return merge_heads(scaled_dot_product_attention(query, key, value, mask)) @ W_O
    # end


# %% [markdown]
# ## 5. One step of an LSTM (2 points)
#
# The gates are x W + h U + b, split into i, f, g and o. The new cell is c' = σ(f) c + σ(i) tanh(g), and
# the new state is h' = σ(o) tanh(c').


# %%
def lstm_step(x, h, c, W, U, b):
    """Returns (h', c'), each [hidden]; W is [d, 4 hidden], and U is [hidden, 4 hidden]."""
    # solution
    i, f, g, o = jnp.split(x @ W + h @ U + b, 4)
    cell = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell
    # end


# %% [markdown]
# ## 6. The probability of a text (2 points)
#
# Row t of `logits` predicts token t + 1. Return log P(x_2, …, x_m | x_1) = Σ_t log P(x_{t+1} | x_1 …
# x_t). The logits may be large.


# %%
def log_probability(logits, tokens):
    """Returns a number; logits is [m, vocab], and tokens is int [m]."""
    # solution
    log_probs = jax.nn.log_softmax(logits[:-1])
    return jnp.take_along_axis(log_probs, tokens[1:, None], axis=1).sum()
    # end


# %% [markdown]
# ## 7. Which inputs does a convolution read? (2 points)
#
# Output t of a causal convolution of size K with dilation d depends on the inputs t, t − d, …,
# t − (K − 1) d, as far as they exist. Return the Boolean matrix [m, m] whose entry (t, s) is true if
# output t depends on input s.


# %%
def convolution_rule(m, size, dilation):
    """Returns bool [m, m]."""
    # solution
    distance = jnp.arange(m)[:, None] - jnp.arange(m)
    return (distance >= 0) & (distance < size * dilation) & (distance % dilation == 0)
    # end
