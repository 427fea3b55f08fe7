"""Errors for mistaken arguments of models and decoding: each message names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.models.kinds import MODELS
from tests.errors import error_of
from tests.properties import tiny

TOKENS = tiny.tokens(0, 1, 6)
KEY = jax.random.key(0)


def model():
    return tiny.build(num_layers=1)


def weights():
    return tiny.weights(model(), 0)


def generate(prompts=((1, 2),), key=KEY, max_new_tokens=2, variables=None):
    variables = weights() if variables is None else variables
    return jf.generate(model(), variables, prompts, max_new_tokens=max_new_tokens, key=key)


def inspect(**hooks):
    return model().apply(weights(), TOKENS, method="inspect", **hooks)


def of_another_shape():
    """Returns variables whose token table has a shape that no config here has."""
    params = weights()["params"]
    return {"params": {**params, "embedding": {**params["embedding"], "tokens": jnp.ones((3, 2))}}}


REFUSED = {
    "generate was called on traced arrays": [
        lambda: jax.jit(lambda v: generate(variables=v).tokens)(weights()),
        lambda: jax.vmap(lambda key: generate(key=key).tokens)(jax.random.split(KEY, 2)),
        lambda: jax.vmap(lambda prompts: generate(prompts).tokens)(jnp.ones((2, 1, 3), int)),
    ],
    "beam_search was called on traced arrays": [
        lambda: jax.jit(
            lambda v: jf.beam_search(model(), v, [[1]], max_new_tokens=2).tokens,
        )(weights())
    ],
    "patch 'block.input' is a tuple; it must be a Patch": [
        lambda: inspect(patch={"block.input": (True, 0.0)})
    ],
    "patch 'block.input': value is a .*; it must be an array": [
        lambda: inspect(patch={"block.input": jf.Patch(np.ones((1, 1, 1)), jnp.sin)}),
        lambda: jf.inspect(
            model(), weights(), TOKENS, patch={"block.input": jf.Patch(np.ones((1, 1, 1)), len)}
        ),
        lambda: jf.generate(
            model(),
            weights(),
            [[1]],
            max_new_tokens=2,
            key=KEY,
            patch={"block.input": jf.Patch(np.ones((1, 1, 1)), len)},
        ),
    ],
    "patch 'block.input': where is a NoneType; it must be an array": [
        lambda: jf.inspect(model(), weights(), TOKENS, patch={"block.input": jf.Patch(None, 0.0)})
    ],
    "patch is a list; it must map names to Patch": [lambda: inspect(patch=["block.input"])],
    "capture is 'block.input'; it must be a tuple": [lambda: inspect(capture="block.input")],
    "no hook point is named 'blok.input'; did you mean block.input": [
        lambda: inspect(capture=("blok.input",)),
        lambda: inspect(patch={"blok.input": jf.Patch(True, 0.0)}),
    ],
    r"does not store parameters; call model.apply\(variables": [
        lambda: model()(TOKENS),
        lambda: model().inspect(TOKENS),
        lambda: model().hidden_states(TOKENS),
        lambda: model().head(),
    ],
    r"parameter embedding/tokens is \(3, 2\); for this config it must be": [
        lambda: jf.score(model(), of_another_shape(), TOKENS),
        lambda: jf.inspect(model(), of_another_shape(), TOKENS),
        lambda: model().apply(of_another_shape(), TOKENS),
    ],
    "parameter .*kernel is int32; parameters are floats": [
        lambda: model().apply(
            jax.tree.map(lambda x: x.astype(int) if x.ndim == 3 else x, weights()), TOKENS
        )
    ],
    "variables contain blocks.*; they must contain 'params'": [
        lambda: model().apply(dict(sorted(weights()["params"].items())), TOKENS)
    ],
    r"variables contain \[1\]; they must contain 'params'": [lambda: model().apply([1], TOKENS)],
    "tokens are sequences of unequal lengths": [
        lambda: model().apply(weights(), [[1, 2], [3]]),
        lambda: jf.score(model(), weights(), [[1, 2], [3]]),
    ],
    r"tokens is float32 \(1, 3, 8\); score accepts integer token ids": [
        lambda: jf.score(model(), weights(), jnp.ones((1, 3, 8)))
    ],
    r"tokens has shape \(1, 0\); it must hold at least one": [
        lambda: jf.extend(
            model(), weights(), TOKENS[:, :0], jf.init_cache(model(), weights(), 1, 4)
        )
    ],
    "max_new_tokens is 2.5; it must be a whole number": [lambda: generate(max_new_tokens=2.5)],
    "batch_size is 1.5; it must be a whole": [lambda: jf.init_cache(model(), weights(), 1.5, 4)],
    "capacity is True; it must be a whole": [lambda: jf.init_cache(model(), weights(), 1, True)],
    "beam_width is 2.5; it must be a whole": [
        lambda: jf.beam_search(model(), weights(), [[1]], max_new_tokens=2, beam_width=2.5)
    ],
    "key is 5; it must be a single key": [lambda: generate(key=5)],
    r"(?s)key is Array.*; it must be a single key": [
        lambda: generate(key=jax.random.split(KEY, 3))
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_and_decoding_raise_errors_that_name_invalid_arguments(message):
    for mistake in REFUSED[message]:
        with pytest.raises(ValueError, match=message):
            mistake()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_config_dtype_accepts_jax_and_numpy_spellings(dtype):
    """All spellings give equal, hashable configs with a string as `dtype`."""
    config = jf.DecoderConfig(dtype=dtype)
    assert config == jf.DecoderConfig(dtype="bfloat16") and config.dtype == "bfloat16"
    assert type(config.dtype) is str and hash(config) == hash(jf.DecoderConfig(dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"dtype is .*float16.*; it must be one of"):
        jf.DecoderConfig(dtype=np.float16)


@pytest.mark.slow
def test_decoding_accepts_a_legacy_prngkey():
    same = generate(key=jax.random.PRNGKey(0)), generate(key=jax.random.key(0))
    np.testing.assert_array_equal(same[0].tokens, same[1].tokens)


@pytest.mark.parametrize("model", MODELS.values())
@pytest.mark.parametrize("config", MODELS)
def test_model_class_accepts_only_its_own_config_class(model, config):
    """A Decoder with an EncoderConfig would generate, and see later tokens."""
    if model.config_type is config:
        assert type(model(config()).config) is config
    else:
        message = error_of(model, config())
        assert config.__name__ in message and model.config_type.__name__ in message


class Foreign:
    """An array of another library, whose dtype NumPy does not know."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.dtype, self.shape = object(), self.values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __len__(self):
        return len(self.values)


@pytest.mark.slow
def test_models_accept_token_arrays_of_another_library():
    ids = Foreign(TOKENS)
    np.testing.assert_array_equal(model().apply(weights(), ids), model().apply(weights(), TOKENS))
    np.testing.assert_array_equal(
        jf.score(model(), weights(), ids), jf.score(model(), weights(), TOKENS)
    )
    seen = jf.inspect(model(), weights(), ids).logits
    np.testing.assert_array_equal(seen, jf.inspect(model(), weights(), TOKENS).logits)
