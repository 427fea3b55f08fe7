# %% [markdown]
# # Lecture 13: encoder, decoder, cache
#
# Complete the functions: replace each `raise NotImplementedError` by your code. Use only `jax.numpy`,
# unless an exercise names another function. Vectors are the rows of a matrix: x is [m, d], with one row
# for each word.
#
# `pytest docs/exercises --student docs/exercises/lecture-13.ipynb` grades this notebook. The lesson
# `docs/lecture-13.md` explains the formulas.

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

# %% [markdown]
# ## 1. Cross-attention (2 points)
#
# The decoder's words x attend to the words of the source: queries are x Q, keys are source K, and
# values are source V. The scale is 1/√d_k.


# %%
def cross_attention(x, source, Q, K, V):
    """Returns [m, d_v]; x is [m, d], and source is [n, d]."""
    # solution
    scores = (x @ Q) @ (source @ K).T / jnp.sqrt(Q.shape[1])
    return jax.nn.softmax(scores) @ (source @ V)
    # end


# %% [markdown]
# ## 2. Padding (2 points)
#
# Sources of different lengths are padded to one length. Return the mask [batch, m, n] with which m
# words attend to n source words: entry (b, t, s) is true if word s of source b is not padding.


# %%
def padding_mask(lengths, m, n):
    """Returns bool [batch, m, n]; lengths is int [batch], the number of words of each source."""
    # solution
    visible = jnp.arange(n) < lengths[:, None]
    return jnp.broadcast_to(visible[:, None], (len(lengths), m, n))
    # end


# %% [markdown]
# ## 3. Teacher forcing (1 point)
#
# In training, the decoder reads the target shifted to the right: it begins with the token `begin` and
# lacks the last token of the target.


# %%
def shift_right(target, begin):
    """Returns int [m]; target is int [m]."""
    # solution
    return jnp.concatenate([jnp.array([begin]), target[:-1]])
    # end


# %% [markdown]
# ## 4. Give the decoder a cache (3 points)
#
# Compute causal self-attention for one new word. `cache` is None for the first word, and otherwise the
# cache that your function returned for the word before. The outputs, one after another, must equal
# causal self-attention over the whole text, with the scale 1/√d_k.


# %%
def attend_with_cache(x_t, cache, Q, K, V):
    """Returns (output [d_v], new cache); x_t is [d]."""
    # solution
    key, value = x_t[None] @ K, x_t[None] @ V
    if cache is not None:
        key, value = (jnp.concatenate(pair) for pair in zip(cache, (key, value), strict=True))
    weights = jax.nn.softmax((x_t @ Q) @ key.T / jnp.sqrt(Q.shape[1]))
    return weights @ value, (key, value)
    # end


# %% [markdown]
# ## 5. Greedy decoding (2 points)
#
# Append the most likely next token, until the token `end` has been appended or `most` tokens have been
# appended. `next_logits(tokens)` returns the logits [vocab] of the token after `tokens`, a list of ints.


# %%
def greedy_decode(next_logits, prompt, end, most):
    """Returns a list of ints: the prompt and the new tokens."""
    # solution
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(int(next_logits(tokens).argmax()))
        if tokens[-1] == end:
            break
    return tokens
    # end


# %% [markdown]
# ## 6. The loss of the decoder (2 points)
#
# Return the mean of −log P(target) over the targets that are not padding. The logits may be large.


# %%
def loss(logits, targets, is_real):
    """Returns a number; logits is [m, vocab], targets is int [m], and is_real is bool [m]."""
    # solution
    log_probs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
    return jnp.where(is_real, losses, 0).sum() / is_real.sum()
    # end
