# %% [markdown]
# # Lecture 10: attention and a first decoder
#
# Complete the functions: replace each `raise NotImplementedError` by your code. Use only `jax.numpy`,
# unless an exercise names another function. Vectors are the rows of a matrix: x is [m, d], with one row
# for each word.
#
# `pytest docs/exercises --student docs/exercises/lecture-10.ipynb` grades this notebook. The lesson
# `docs/lecture-10.md` explains the formulas.

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

from jaxformer.verify import dependency_matrix

# %% [markdown]
# ## 1. A softmax that survives large scores (2 points)
#
# Compute exp(s_j) / Σ_k exp(s_k) over the last axis, for scores of any size. exp(1000) overflows in
# float32. The softmax does not change if the same number is subtracted from all scores.


# %%
def softmax(scores):
    """Returns the softmax over the last axis; scores is [..., keys]."""
    # solution
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
    # end


# %% [markdown]
# ## 2. Self-attention (2 points)
#
# Each word has a query q = x Q, a key k = x K and a value v = x V. Compute softmax(q kᵀ) v, without a
# scale.


# %%
def self_attention(x, Q, K, V):
    """Returns [m, d_v]; x is [m, d], Q and K are [d, d_k], and V is [d, d_v]."""
    # solution
    return softmax((x @ Q) @ (x @ K).T) @ (x @ V)
    # end


# %% [markdown]
# ## 3. The causal mask (1 point)
#
# Return a Boolean matrix [m, m]. Entry (t, s) is true if word t may attend to word s, which is the case
# for s ≤ t.


# %%
def causal_mask(m):
    """Returns bool [m, m]."""
    # solution
    return jnp.tril(jnp.ones((m, m), bool))
    # end


# %% [markdown]
# ## 4. Masked self-attention (2 points)
#
# Scores of words that are not visible are −∞, so their weights are exactly 0.


# %%
def masked_self_attention(x, Q, K, V, mask):
    """Returns [m, d_v]; mask is bool [m, m], and every row has at least one true entry."""
    # solution
    scores = (x @ Q) @ (x @ K).T
    return softmax(jnp.where(mask, scores, -jnp.inf)) @ (x @ V)
    # end


# %% [markdown]
# ## 5. Positions (1 point)
#
# Add the position vector p_i to the vector of the word at position i. There are at least m position
# vectors.


# %%
def add_positions(x, positions):
    """Returns [m, d]; x is [m, d], and positions is [max_length, d]."""
    # solution
    return x + positions[: len(x)]
    # end


# %% [markdown]
# ## 6. The feed-forward layer of the lecture (1 point)
#
# Compute σ(W₂ σ(W₁ x + b₁) + b₂) for each word, where σ is ReLU.


# %%
def feed_forward(x, W1, b1, W2, b2):
    """Returns [m, d]; W1 is [d, hidden], and W2 is [hidden, d]."""
    # solution
    hidden = jax.nn.relu(x @ W1 + b1)
    return jax.nn.relu(hidden @ W2 + b2)
    # end


# %% [markdown]
# ## 7. Find the leak (2 points)
#
# A function f maps [m, d] to [m, d]. Return True if output t depends on an input after t. You may use
# `dependency_matrix(f, x).matrix` of `jaxformer.verify`, a Boolean matrix [m, m] whose entry (t, s) is
# true if output t depends on input s.


# %%
def leaks(f, x):
    """Returns whether an output of f depends on a later input; x is [m, d]."""
    # solution
    return bool(jnp.triu(dependency_matrix(f, x).matrix, 1).any())
    # end
