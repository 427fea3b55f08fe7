"""Tests of `dependency_matrix`: its witnesses must agree, or report why they do not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.verify import assert_dependencies, compare, dependency_matrix, rules
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 8


# ---- plain functions and models of other libraries


def running_mean(x):
    """Returns the running mean of x [length, dim], with plain JAX."""
    return jnp.cumsum(x, axis=0) / jnp.arange(1.0, len(x) + 1)[:, None]


class Attention(nnx.Module):
    """A model in Flax NNX. With `shift=1` it has a bug: the mask's diagonal is off by one."""

    def __init__(self, shift=0):
        self.shift = shift
        self.embed = nnx.Embed(13, 16, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(16, rngs=nnx.Rngs(1))
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(2))
        self.head = nnx.Linear(16, 13, rngs=nnx.Rngs(3))

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool), self.shift)
        return self.head(x + self.attention(self.norm(x), mask=mask))


@pytest.mark.parametrize("witness", ["taint", "derivative", "change", None])
def test_each_dependency_analysis_finds_that_a_running_mean_is_causal(witness):
    x, witnesses = tiny.embeddings(0, LENGTH, 4), witness and (witness,)
    found = assert_dependencies(running_mean, x, rules.causal(LENGTH), witnesses=witnesses)
    assert not found.disagreements and not found.remarks


@pytest.mark.slow
def test_dependency_matrix_accepts_a_model_of_another_library():
    tokens = np.arange(LENGTH)
    found = assert_dependencies(Attention(), tokens, rules.causal(LENGTH))
    assert set(found.witnesses) == {"taint", "change"} and not found.disagreements


@pytest.mark.slow
def test_unexpected_dependencies_of_a_shifted_mask_are_listed():
    """It finds seven spurious edges, each one position ahead, and their effects."""
    with pytest.raises(
        AssertionError, match=r"7 unexpected dependencies: output \d ← input \d \(1\.\d+\)"
    ):
        assert_dependencies(Attention(shift=1), np.arange(LENGTH), rules.causal(LENGTH))
    compared = compare(
        dependency_matrix(Attention(shift=1), np.arange(LENGTH)), rules.causal(LENGTH)
    )
    assert {(*edge.output, *edge.input) for edge in compared.spurious} == {
        (i, i + 1) for i in range(LENGTH - 1)
    }
    assert not compared.missing and not compared.holds
    effects = [edge.effect for edge in compared.spurious]
    assert effects == sorted(effects, reverse=True) and effects[-1] > 0


def test_assertion_message_lists_primitives_unknown_to_taint_analysis():
    """The message says that the edges may come from a missing rule only."""
    x = tiny.embeddings(0, 3, 3)
    with pytest.raises(
        AssertionError, match=r"unexpected.*; taint analysis has no rule for cholesky"
    ):
        assert_dependencies(lambda x: jnp.linalg.cholesky(x @ x.T), x, rules.visible(3, window=1))


def test_assertion_lists_expected_dependencies_that_a_function_lacks():
    x, rule = tiny.embeddings(0, LENGTH, 4), rules.bidirectional(LENGTH)
    with pytest.raises(AssertionError, match="28 missing dependencies"):
        assert_dependencies(running_mean, x, rule)
    compared = compare(dependency_matrix(running_mean, x), rule)
    assert len(compared.missing) == LENGTH * (LENGTH - 1) // 2 and not compared.spurious


# ---- effects of the size of rounding


def convolve(x):
    """Returns the causal convolution of x [length, dim] with a decaying kernel, by a padded FFT."""
    length = len(x)
    kernel = 1 / jnp.arange(1.0, length + 1)[:, None]
    product = jnp.fft.rfft(x, 2 * length, axis=0) * jnp.fft.rfft(kernel, 2 * length, axis=0)
    return jnp.fft.irfft(product, 2 * length, axis=0)[:length]


MEASURED = ("derivative", "change")


def test_a_convolution_by_fft_is_causal_up_to_rounding():
    """With the advice of the error message it holds. By default its rounding is spurious edges."""
    x, rule = tiny.embeddings(0, LENGTH, 4), rules.causal(LENGTH)
    with pytest.raises(
        AssertionError, match=r"if they are rounding errors, pass atol=\de-0[67] and"
    ) as said:
        assert_dependencies(convolve, x, rule)
    atol = float(re.findall(r"atol=(\S+)", str(said.value))[0])
    found = assert_dependencies(convolve, x, rule, atol=atol, witnesses=MEASURED)
    above = ~rule
    assert 0 < found.effects[above].max() <= atol < found.effects[rule].min()
    with pytest.raises(AssertionError, match=r"pass atol=\de-0[67]$"):
        assert_dependencies(convolve, x, rule, witnesses=MEASURED)


@pytest.mark.parametrize("witness", MEASURED)
def test_only_effects_larger_than_atol_are_reported_as_dependencies(witness):
    """The effects of four inputs are 1, 1e-3, 1e-6 and 1e-9 of the same value."""
    sizes = jnp.asarray([1.0, 1e-3, 1e-6, 1e-9])
    x, others = jnp.ones((4, 1)), jnp.full((4, 1), 2.0)

    def function(x):
        return x * 0 + (sizes[:, None] * jnp.where(x > 1.5, x, x)).sum()

    for atol, number in {0.0: 4, 1e-8: 3, 1e-5: 2, 1e-2: 1, 10.0: 0}.items():
        options = {"others": others, "atol": atol, "witnesses": (witness,)}
        found = dependency_matrix(function, x, **options)
        wanted = np.tile(np.arange(4) < number, (4, 1))
        if witness == "change" and atol == 0.0:  # 1e-9 beside 1 is rounded away
            wanted[:, 3] = False
        np.testing.assert_array_equal(found.matrix, wanted)


def test_atol_does_not_affect_taint_analysis():
    """Neither a path whose effect is 0 now, as behind weights of zero, nor one that is small."""
    x = tiny.embeddings(0, LENGTH, 4)
    for factor in (0.0, 1e-9):

        def leak(weight, x):
            return x + weight * x.mean(axis=0)

        found = dependency_matrix(leak, x, weights=jnp.asarray(factor), atol=2.0)
        assert found.matrix.all()


@pytest.mark.parametrize("atol", [-1e-9, float("nan"), float("inf"), "0", None])
def test_dependency_matrix_rejects_invalid_atol(atol):
    with pytest.raises(ValueError, match="atol is"):
        dependency_matrix(running_mean, jnp.ones((3, 2)), atol=atol)


def test_message_about_a_large_unexpected_dependency_does_not_suggest_atol():
    with pytest.raises(AssertionError) as said:
        assert_dependencies(running_mean, tiny.embeddings(0, 4, 2), rules.visible(4, window=1))
    assert "atol" not in str(said.value)


# ---- the models of the package, with all witnesses, in batches


MODELS = {
    "decoder": {"window": 3, "num_layers": 2},
    "blockwise": {"attention": "blockwise", "prefix": 2, "positions": "rotary"},
    "encoder": {"kind": jf.EncoderConfig},
    "lstm": {"kind": jf.RecurrentConfig},
    "rnn": {"kind": jf.RecurrentConfig, "cell": "rnn"},
    "cnn": {"kind": jf.ConvolutionalConfig, "kernel_size": 3, "activation": "gelu"},
    "dilated cnn": {"kind": jf.ConvolutionalConfig, "dilation_growth": 2, "activation": "gelu"},
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, slow=["cnn"]))
def test_all_dependency_analyses_agree_with_the_masks_of_each_model(name):
    """From embeddings to hidden states, on two sequences with different documents and padding."""
    model = tiny.build(**MODELS[name])
    variables, x = tiny.weights(model, 0), tiny.embeddings(0, 2, 10, model.config.embed_dim)
    segment_ids = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0]])

    def hidden(x):
        return model.apply(variables, x, jnp.asarray(segment_ids), method="hidden_states")

    found = assert_dependencies(hidden, x, rules.model_rule(model.config, segment_ids))
    assert set(found.witnesses) == {"taint", "derivative", "change"}
    assert not found.disagreements and not found.remarks


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jf.EncoderDecoderConfig, jf.RecurrentEncoderDecoderConfig])
def test_encoder_decoder_outputs_depend_on_every_source_token(kind):
    model = tiny.build(kind=kind)
    variables, source = tiny.weights(model, 0), tiny.embeddings(0, 2, 7, 8)
    there, tokens = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]), tiny.tokens(0, 2, 5)

    def logits(source):
        read = {"source": source, "source_segment_ids": jnp.asarray(there)}
        return model.apply(variables, tokens, **read)

    assert_dependencies(logits, source, rules.source_rule(np.ones((2, 5), int), there))


@pytest.mark.slow
@settings(max_examples=3)  # each example is traced again
@given(seed=tiny.seeds)
def test_dependencies_on_token_ids_equal_those_expected_from_masks(seed):
    model = tiny.build(window=2)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 1, 6)
    found = dependency_matrix(
        lambda tokens: model.apply(variables, tokens), tokens, witnesses=("taint",)
    )
    np.testing.assert_array_equal(
        found.matrix, rules.model_rule(model.config, np.ones((1, 6), int))
    )


# ---- limits of the witnesses


def test_disagreement_between_dependency_analyses_states_a_reason():
    """Paths without an effect: terms that cancel, and a ReLU below 0."""
    x = jnp.abs(tiny.embeddings(0, 3, 2)) + 1.0
    cancelled = dependency_matrix(lambda x: x + (x[:1] - x[:1]), x)
    assert cancelled.matrix[:, 0].all()
    assert any("derivative is 0" in entry.why for entry in cancelled.disagreements)
    dead = dependency_matrix(lambda x: jax.nn.relu(-x), x, others=x + 1)
    assert dead.matrix.sum() == 3 and not dead.effects.any() and len(dead.disagreements) == 6


@pytest.mark.parametrize("witness", ["taint", "derivative", "change"])
def test_dependency_through_a_single_feature_is_found_by_each_analysis(witness):
    """A leak through any single feature is found."""
    for feature in range(4):
        leak = np.eye(4, dtype=np.float32)[feature]
        found = dependency_matrix(
            lambda x, leak=leak: x + leak * x[:1].sum(), jnp.ones((3, 4)), witnesses=(witness,)
        )
        assert found.matrix[:, 0].all(), feature


def test_zero_times_infinity_is_reported_as_a_dependency():
    """0 × ∞ is NaN, so "change" sees an effect where taint follows no path, and says why."""
    x, others = jnp.ones((3, 2)), jnp.full((3, 2), jnp.inf)
    found = dependency_matrix(lambda x: x + 0 * x.sum(axis=0), x, others=others)
    assert found.matrix.all() and found.effects.max() == np.inf
    assert any("infinity" in entry.why for entry in found.disagreements)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_dependency_matrix_perturbs_token_ids_of_any_integer_dtype(dtype):
    found = dependency_matrix(
        lambda ids: jnp.cumsum(ids, dtype=ids.dtype), np.arange(5, dtype=dtype)
    )
    np.testing.assert_array_equal(found.matrix, rules.causal(5))
    assert not found.disagreements


def test_dependency_matrix_adds_remark_if_reverse_mode_is_unsupported():
    def function(x):
        return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]

    x = tiny.embeddings(0, 3, 2)
    found = dependency_matrix(function, x)
    assert "derivative" not in found.witnesses and "no derivative" in found.remarks[0]
    np.testing.assert_array_equal(found.matrix, np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match="Reverse-mode"):
        dependency_matrix(function, x, witnesses=("derivative",))


def test_sampling_of_tested_inputs_does_not_affect_taint_analysis():
    """Taint finds all paths whichever inputs `sample` selects for the other witnesses."""
    z = jnp.array([[-1.0], [1.0], [1.0], [1.0]])

    def function(z):
        return z + jnp.maximum(z[:1], 0) * z[1:2]

    for seed in range(3):
        how = {"witnesses": ("derivative", "taint"), "sample": 1, "seed": seed}
        assert dependency_matrix(function, z, **how).matrix[:, 1].all()


def test_primitive_unknown_to_taint_analysis_adds_a_remark_to_the_result():
    x = tiny.embeddings(0, 3, 3)
    found = dependency_matrix(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(3)), x)
    assert "no rule for" in found.remarks[0] and "cholesky" in found.remarks[0]
    assert found.disagreements


@pytest.mark.parametrize("sample", [1, 3])
def test_sample_argument_of_dependency_matrix_limits_number_of_tested_inputs(sample):
    found = dependency_matrix(running_mean, tiny.embeddings(0, LENGTH, 4), sample=sample)
    others = sample * LENGTH
    assert found.witnesses == {"taint": LENGTH**2, "derivative": others, "change": others}
    asked = ~np.isnan(found.effects)
    assert asked.sum() == 2 * others - sample**2
    np.testing.assert_array_equal(found.matrix, rules.causal(LENGTH))


REFUSED = {
    "witness is 'guess'; it must be one of taint": {"witnesses": ("guess",)},
    "witnesses is empty": {"witnesses": ()},
    "needs float inputs, but inputs are integers": {
        "inputs": np.arange(3),
        "witnesses": ("derivative",),
    },
    "inputs are float32 (3,)": {"inputs": np.ones(3, np.float32)},
    "the function returns ShapeDtypeStruct(shape=()": {"function": jnp.sum},
    "sample is 0; it must be a whole number of at least 1": {"sample": 0},
    "sample is 2.5; it must be a whole number": {"sample": 2.5},
    "seed is -1; it must be a whole number of at least 0": {"seed": -1},
    "witnesses is 'taint'; it must be a tuple": {"witnesses": "taint"},
    "inputs have type dict; pass one array": {"inputs": {"x": 1}},
    "others equal inputs at position 0; they must differ": {"others": np.ones((3, 2), np.float32)},
    "others have shape": {"others": np.ones((2, 2))},
}


@pytest.mark.parametrize("message", REFUSED)
def test_dependency_matrix_and_compare_reject_invalid_arguments(message):
    given = {"function": running_mean, "inputs": np.ones((3, 2), np.float32), **REFUSED[message]}
    with pytest.raises(ValueError) as error:
        dependency_matrix(given.pop("function"), given.pop("inputs"), **given)
    assert message in str(error.value)
    found = dependency_matrix(running_mean, np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"rule is bool \(4, 4\); it must be bool \(3, 3\)"):
        compare(found, rules.causal(4))
