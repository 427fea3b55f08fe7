"""The masked keys of captured attention maps equal the rule of the model."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.decoding.autoregressive import inspect
from jaxformer.functional.attention.masks import Mask
from jaxformer.interpret.page_file import unpack
from jaxformer.interpret.page_masks import masked_keys
from jaxformer.models.parameters import init
from jaxformer.training.presets import training_preset
from jaxformer.verify.rules import layer_rules
from tests.interpret.pages import model_of

LENGTH = 9
CASES = {
    "causal": {},
    "windows": {"window": (3, None)},
    "prefix": {"prefix": 4, "window": (3, None)},
    "long window": {"window": 50},
}


@dataclass(frozen=True)
class EvenKeys(Mask):
    """A query attends to itself and to keys with an even position."""

    def __call__(self, query, key):
        """See `Mask`."""
        q, k = query.position_ids()[..., :, None], key.position_ids()[..., None, :]
        return (k <= q) & ((k % 2 == 0) | (k == q))


def hidden_of(masks, num_layers, length=LENGTH):
    """Returns bool [layers, queries, keys]."""
    if masks is None:
        return np.zeros((num_layers, length, length), bool)
    return unpack(masks["hidden"])[masks["layers"]].astype(bool)


def check_weights(model, variables, hidden, source=None):
    """A masked key has weight 0, and every other key has a positive weight."""
    tokens = np.arange(3, 3 + LENGTH)[None]
    found = inspect(model, variables, tokens, source=source, capture=["attention.weights"])
    weights = np.asarray(found.captured["attention.weights"])[:, 0]
    assert ((weights == 0) == hidden[:, None]).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("quick_compilation")
def test_masked_keys_of_decoder_match_its_mask_and_have_attention_weight_zero(name):
    model, variables = model_of(**CASES[name])
    hidden = hidden_of(masked_keys(model, [0, 1], LENGTH), 2)
    assert hidden.any()
    np.testing.assert_array_equal(~hidden, layer_rules(model.config, LENGTH))
    check_weights(model, variables, hidden)


@pytest.mark.usefixtures("quick_compilation")
def test_keys_hidden_by_a_user_defined_mask_have_attention_weight_zero():
    model, variables = model_of()
    model = model.clone(mask=EvenKeys())
    hidden = hidden_of(masked_keys(model, [0, 1], LENGTH), 2)
    np.testing.assert_array_equal(~hidden, layer_rules(model.config, LENGTH, model.mask))
    check_weights(model, variables, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_masked_keys_of_encoder_and_encoder_decoder_have_attention_weight_zero(kind):
    model = jf.build(training_preset("tiny", kind).model)
    variables = init(model, jax.random.key(0))
    hidden = hidden_of(masked_keys(model, [0, 1], LENGTH), 2)
    assert hidden.any() == (kind == "encoder-decoder")
    source = np.array([[3, 4, 5]]) if model.config.reads_source else None
    check_weights(model, variables, hidden, source)


def test_windows_of_an_encoder_reach_to_both_sides():
    config = jf.EncoderConfig(vocab_size=40, max_length=16, num_layers=2, embed_dim=8, num_heads=2)
    model = jf.Encoder(config)
    assert masked_keys(model, [0, 1], LENGTH) is None
    model = jf.Encoder(jf.EncoderConfig(**{**vars(config), "window": (2, None)}))
    hidden = hidden_of(masked_keys(model, [0, 1], LENGTH), 2)
    np.testing.assert_array_equal(~hidden, layer_rules(model.config, LENGTH))


def test_page_omits_masks_of_models_with_recurrent_or_user_defined_layers():
    lstm = jf.build(training_preset("tiny", "recurrent").model)
    assert masked_keys(lstm, [0, 1], LENGTH) is None
    model, _ = model_of()
    assert masked_keys(model.clone(layers=model.architecture.stack.layers), [0], LENGTH) is None
