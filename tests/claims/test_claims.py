"""Identities that the lecture notes claim, and corrections where the notes are wrong.

Claims about tendencies (depth, distance, the value of each component) are experiments, each with a
figure.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import (
    Convolution,
    LayerNorm,
    Residual,
    dot_product_attention,
    layer_norm,
)
from jaxformer.models.parameters import init
from jaxformer.verify import dependency_matrix
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_lecture_11_states_wrong_softmax_values():
    """Lecture 11 §5 gives [0.9997, 0.0001, 0.0001, 0.0000] for these scores."""
    found = jax.nn.softmax(jnp.array([10.0, 2.0, 3.0, 1.0]))
    np.testing.assert_allclose(found, [0.9986, 0.0003, 0.0009, 0.0001], atol=5e-5)


@pytest.mark.parametrize("mean, variance, slope", [(0, 1, 0.2066), (2, 9, 0.0971)])
def test_a_saturated_softmax_has_small_gradients(mean, variance, slope):
    """The mean of σ′(z) for z ~ N(mean, variance), computed on a fine grid."""
    z, step = np.linspace(-60, 60, 240_001, retstep=True)
    density = np.exp(-((z - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
    slopes = np.asarray(jax.vmap(jax.grad(jax.nn.sigmoid))(jnp.asarray(z, jnp.float32)))
    assert abs((density * slopes).sum() * step - slope) < 5e-5


# ---- layer normalisation


@given(seed=tiny.seeds, size=st.sampled_from([1e-4, 3e-3, 1e-2, 1.0, 100.0]))
def test_variance_after_layer_norm_depends_on_epsilon(seed, size):
    """The variance after normalization is σ²/(σ² + ε), not 1; the mean is 0."""
    x = size * tiny.embeddings(seed, 3, 16)
    y = np.asarray(layer_norm(x, jnp.ones(16)), np.float64)
    variance = np.asarray(x, np.float64).var(axis=-1)
    np.testing.assert_allclose(y.var(axis=-1), variance / (variance + 1e-5), rtol=1e-4)
    assert abs(y.mean(axis=-1)).max() < 1e-5


@given(seed=tiny.seeds)
def test_layer_norm_without_epsilon_amplifies_small_variances(seed):
    """Features of almost no variance are perturbed by 10⁻⁷.

    With ε the output changes by about 1/√ε times as much. Without ε the change is as large as the
    whole vector.
    """
    x = 1e-7 * tiny.embeddings(seed, 16)
    change = 1e-7 * tiny.embeddings(seed + 1, 16)
    with_epsilon, without = (
        jnp.abs(
            layer_norm(x + change, jnp.ones(16), None, e) - layer_norm(x, jnp.ones(16), None, e)
        )
        for e in (1e-5, 1e-20)
    )
    assert with_epsilon.max() < 1e-3 and without.max() > 0.1


@given(seed=tiny.seeds)
def test_scale_and_bias_can_undo_layer_norm_for_one_vector_only(seed):
    """γ = √(σ² + ε), β = μ restore one vector, but not another one with other μ and σ."""
    x = tiny.embeddings(seed, 2, 16) * jnp.array([[1.0], [3.0]]) + jnp.array([[0.0], [2.0]])
    scale = jnp.sqrt(x[0].var() + 1e-5) * jnp.ones(16)
    back = layer_norm(x, scale, x[0].mean() * jnp.ones(16))
    tiny.close(back[0], x[0])
    assert abs(back[1] - x[1]).max() > 0.1


@given(seed=tiny.seeds, size=st.sampled_from([1.0, 1e-2, 1e-5]))
def test_layer_norm_with_small_sigma_depends_on_where_epsilon_is_added(seed, size):
    """(x − μ)/(σ + ε) (lecture 13 §6) equals (x − μ)/√(σ² + ε) only for σ ≫ √ε."""
    x = np.asarray(tiny.embeddings(seed, 16), np.float64)
    x = np.float32(size * (x - x.mean()) / x.std())
    other = (x - x.mean()) / (x.std() + 1e-5)
    apart = (
        abs(np.asarray(layer_norm(jnp.asarray(x), jnp.ones(16))) - other).max() / abs(other).max()
    )
    expected = abs(1 - (size + 1e-5) / np.sqrt(size**2 + 1e-5))
    np.testing.assert_allclose(apart, expected, atol=1e-3)


# ---- scores


@pytest.mark.parametrize("dim", mostly_slow([4, 64, 512], 4, 64))
def test_attention_scores_have_variance_d_and_scaled_scores_variance_1(dim):
    query, key = jax.random.normal(jax.random.key(dim), (2, 20_000, dim))
    scores = (query * key).sum(axis=-1)
    error = 5 * np.sqrt(2 / 20_000) * np.sqrt(1 + 3 / dim)  # five standard errors of a variance
    assert abs(scores.var() / dim - 1) < error
    assert abs((scores / dim**0.5).var() - 1) < error


@pytest.mark.parametrize("heads, head_dim", [(4, 8), (4, 32), (1, 32), (8, 4)])
def test_attention_parameter_counts_include_the_output_projection(heads, head_dim):
    """4 H d · head_dim: 4 H d² for heads of width d, and 4 d² for heads of width d / H.

    The count 3 H d² of lecture 11 §4 omits W_O.
    """
    config = jf.DecoderConfig(
        vocab_size=2, embed_dim=32, num_heads=heads, head_dim=head_dim, use_bias=False, num_layers=1
    )
    shapes = jax.eval_shape(lambda key: init(jf.build(config), key), jax.random.key(0))["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]["attention"]))
    assert count == 4 * heads * head_dim * 32


# ---- order


def vectors(kind=jf.EncoderConfig, **options):
    """Returns a function from a text to its vectors, for a tiny model without positions."""
    model = tiny.build(kind=kind, positions="none", **options)
    variables, table = tiny.weights(model, 0), tiny.embeddings(7, 9, model.config.embed_dim)
    words = "zuko made his uncle some tea at place iroh".split()

    def run(text):
        x = table[jnp.array([words.index(word) for word in text.split()])]
        return np.asarray(model.apply(variables, x[None], method="hidden_states"))[0]

    return run


ONE, OTHER = "zuko made his uncle some tea", "his uncle made zuko some tea"


@given(seed=tiny.seeds)
def test_attention_without_positions_is_permutation_equivariant(seed):
    """The whole encoder is permutation equivariant.

    Invariance holds only for the output of one word when the other words change places.
    """
    model = tiny.build(kind=jf.EncoderConfig, positions="none")
    variables, x = tiny.weights(model, seed), tiny.embeddings(seed, 1, 7, 8)
    order = np.random.default_rng(seed).permutation(7)
    run = tiny.apply(model)
    tiny.close(run(variables, x[:, order], None), run(variables, x, None)[:, order])
    others = np.append(0, 1 + np.random.default_rng(seed).permutation(6))
    tiny.close(run(variables, x[:, others], None)[:, 0], run(variables, x, None)[:, 0])


@pytest.mark.slow
def test_attention_without_positions_ignores_word_order():
    """ "Zuko" gets the same vector in both sentences, but not with positions or a causal mask."""
    run = vectors()
    one, other = run(ONE), run(OTHER)
    tiny.close(one[0], other[3])
    causal = vectors(jf.DecoderConfig)
    assert abs(causal(ONE)[0] - causal(OTHER)[3]).max() > 1e-2
    model = tiny.build(kind=jf.EncoderConfig, positions="sinusoidal")
    variables, x = tiny.weights(model, 0), tiny.embeddings(7, 1, 6, 8)
    order = np.array([2, 3, 1, 0, 4, 5])
    whole, permuted = (tiny.apply(model)(variables, y, None) for y in (x, x[:, order]))
    assert abs(np.asarray(permuted) - np.asarray(whole)[:, order]).max() > 1e-2


@pytest.mark.slow
def test_attention_without_positions_distinguishes_different_words():
    """ "… at Zuko's place" and "… at Iroh's place" (lecture 10 §5) differ in their words.

    Therefore this pair does not show that the order is lost.
    """
    run = vectors()
    some, other = (
        run("zuko made his uncle tea at zuko place"),
        run("his uncle made zuko tea at iroh place"),
    )
    assert abs(some[-2] - other[-2]).max() > 1e-2


@given(seed=tiny.seeds)
def test_a_causal_mask_makes_attention_depend_on_word_order(seed):
    """Under the mask, attention of permuted inputs is not the permuted attention."""
    x = tiny.embeddings(seed, 1, 6, 8)
    causal, order = jnp.tril(jnp.ones((6, 6), bool)), np.array([5, 0, 1, 2, 3, 4])
    some, other = (dot_product_attention(y, y, y, causal) for y in (x[:, order], x))
    assert abs(some - other[:, order]).max() > 1e-3


# ---- parts that the figures of the notes omit


@pytest.mark.slow
@settings(max_examples=4)  # runs without jit, so examples are slow
@given(seed=tiny.seeds, size=st.sampled_from([1.0, 30.0]))
def test_a_pre_norm_stack_ends_in_a_norm(seed, size):
    """Lecture 11 §6 draws no final norm; without it logits grow with the residual stream."""
    model = tiny.build(use_bias=False)
    params = tiny.weights(model, seed)["params"]
    params = {**params, "final_norm": jax.tree.map(jnp.ones_like, params["final_norm"])}
    x = size * tiny.embeddings(seed, 2, 7, 8)
    y = np.asarray(model.apply({"params": params}, x, method="hidden_states"))
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose(y.std(axis=-1), 1, atol=1e-2)


@pytest.mark.slow
@settings(max_examples=3)  # runs without jit, so examples are slow
@given(seed=tiny.seeds)
def test_query_of_seq2seq_attention_is_the_decoder_state(seed):
    """Lecture 10 §1 writes q = e_i, the encoder's state; the query is the decoder's state h_t.

    α_t = softmax_j(h_t · K e_j), and the output is tanh(W [a_t; h_t] + b).
    """
    model = tiny.build(kind=jf.RecurrentEncoderDecoderConfig)
    variables = tiny.weights(model, seed)
    source, tokens = (jnp.asarray(tiny.tokens(seed + i, 1, n)) for i, n in enumerate((5, 4)))
    points = ("encoder.final_norm", "recurrent.hidden")
    seen = jf.inspect(model, variables, tokens, source=source, capture=points).captured
    encoded, hidden = np.asarray(seen[points[0]][0]), np.asarray(seen[points[1]][-1, 0])
    layers = model.architecture.stack.layer_trees(variables["params"]["blocks"])
    weights = oracle.float64(layers[-1]["cross_attention"])
    key, value = (encoded @ weights[name]["kernel"] for name in ("key", "value"))
    everything = np.ones((len(hidden), len(key)), bool)
    context = oracle.attention(hidden[None], key[None], value[None], everything, scale=1.0)[0]
    both = np.concatenate([context, hidden], axis=-1)
    expected = np.tanh(oracle.linear(weights["output"], both))
    found = model.apply(variables, tokens, source=source, method="hidden_states")
    tiny.close(found[0], expected)


# ---- autoregressive


@given(seed=tiny.seeds)
def test_logits_at_i_predict_token_i_plus_1_and_depend_on_token_i(seed):
    """log P(x_{i+1} | x_≤i) is read from output i, which depends on token i but not on i + 1.

    Lecture 11 §7 writes x_<i, §8 writes x_≤i.
    """
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 7)
    run = tiny.apply(model)
    logits = np.asarray(run(variables, tokens))[0]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    total = log_probs[np.arange(6), tokens[0, 1:]].sum()
    tiny.close(jf.score(model, variables, tokens), [total])
    i = seed % 6
    for place, changes in ((i, True), (i + 1, False)):
        other = tokens.copy()
        other[0, place] = (other[0, place] + 1) % model.config.vocab_size
        assert (np.asarray(run(variables, other))[0, i] != logits[i]).any() == changes


@pytest.mark.slow
def test_lecture_11_states_wrong_dependencies_of_convolutions():
    """Lecture 11 §8: the edges of two convolutions over four positions.

    The causal convolution of width 2 has 7 edges; the list of the notes omits 4→4. The centred one
    of width 3 has 10, and 2→1, 3→2 and 4→3 in the list are from it.
    """
    edges, sizes = {}, {"kind": jf.ConvolutionalConfig, "num_layers": 1, "kernel_size": 2}
    centred = ((Residual(Convolution((-1, 0, 1)), LayerNorm()),),)
    for causal in (True, False):
        model = replace(tiny.build(**sizes), layers=None if causal else centred)
        variables, x = tiny.weights(model, 0), tiny.embeddings(0, 1, 4, 8)
        found = dependency_matrix(lambda x, m=model, v=variables: m.apply(v, x), x).matrix
        edges[causal] = {(j + 1, i + 1) for i, j in np.argwhere(found[0, :, 0]).tolist()}
    assert len(edges[True]) == 7 and (4, 4) in edges[True]
    assert len(edges[False]) == 10 and edges[False] - edges[True] == {(2, 1), (3, 2), (4, 3)}


@given(seed=tiny.seeds)
def test_a_cached_decoding_step_keeps_the_shapes_of_the_cache_arrays(seed):
    """`extend` keeps all shapes of the cache, so that no step compiles again."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 5)
    cache = jf.init_cache(model, variables, 1, 8)
    shapes = jax.tree.map(jnp.shape, cache)
    for t in range(5):
        _, cache = jf.extend(model, variables, tokens[:, t : t + 1], cache)
        assert jax.tree.map(jnp.shape, cache) == shapes
