"""Attention weights of a text, their picture and the verb that draws it."""

import numpy as np
import pytest
from matplotlib.image import imread

import jaxformer as jf
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.interpret.attention import attention_maps, describe, draw_attention
from jaxformer.interpret.encoded_text import EncodedText
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

IDS, SOURCE = [3, 1, 4, 1, 5], [9, 2, 6]
TEXT, PLAIN = EncodedText(IDS, SOURCE), EncodedText(IDS)


def maps_of(kind, which):
    model = tiny.build(kind)
    text = TEXT if model.config.reads_source else PLAIN
    return model, attention_maps(model, tiny.weights(model, 0), text, which=which)


@pytest.mark.parametrize(
    "kind, which, shape",
    [
        (jf.DecoderConfig, "self", (2, 4, 5, 5)),
        (jf.EncoderConfig, "self", (2, 4, 5, 5)),
        (jf.EncoderDecoderConfig, "cross", (2, 4, 5, 3)),
        (jf.EncoderDecoderConfig, "encoder", (2, 4, 3, 3)),
        (jf.RecurrentEncoderDecoderConfig, "cross", (1, 1, 5, 3)),
    ],
)
def test_captured_attention_weights_sum_to_1_and_follow_the_mask(kind, which, shape):
    """Padding of the source has no weight, and a decoder gives later tokens none."""
    _, maps = maps_of(kind, which)
    assert maps.weights.shape == shape
    np.testing.assert_allclose(maps.weights.sum(-1), 1, rtol=1e-5)
    assert (len(maps.queries), len(maps.keys)) == shape[2:]
    if which == "self":
        assert np.triu(maps.weights, 1).any() == (kind is jf.EncoderConfig)


def test_attention_maps_of_a_string_equal_those_of_its_token_ids():
    model = jf.Decoder(jf.DecoderConfig(vocab_size=257, num_layers=1, embed_dim=8, num_heads=2))
    variables, tokenizer = tiny.weights(model, 0), ByteTokenizer.train([], 257)
    ids = [*tokenizer.text_opening, *tokenizer.encode_many(["a cat"])[0]]
    expected = attention_maps(model, variables, EncodedText(ids))
    for text in ("a cat", ids, np.array(ids)):
        found = attention_maps(model, variables, text, tokenizer)
        np.testing.assert_array_equal(found.weights, expected.weights)
    with pytest.raises(ValueError, match="tokenizer is None, so text must be a list"):
        attention_maps(model, variables, "a cat")
    with pytest.raises(ValueError, match=r"text is float64 .* it must be a text or a list"):
        attention_maps(model, variables, [0.5])


def test_attention_maps_of_a_source_without_a_tokenizer_need_the_ids_of_the_text():
    model = tiny.build(jf.EncoderDecoderConfig)
    with pytest.raises(ValueError, match="text must be an EncodedText with the ids of text and"):
        attention_maps(model, tiny.weights(model, 0), SOURCE, which="cross")


def test_attention_weights_have_the_layer_numbers_of_the_model(tmp_path):
    """In a model with convolutions in the layers between."""
    types = ("short_convolution", "attention")
    model = tiny.build(num_layers=4, positions="rotary", layer_types=types)
    variables = tiny.weights(model, 0)
    maps = attention_maps(model, variables, PLAIN)
    assert maps.layers == (1, 3) and len(maps.weights) == 2
    captured = jf.inspect(model, variables, [IDS], capture=("attention.weights",)).captured
    row = np.asarray(captured["attention.weights"])[1, 0, 2, 4]
    assert describe(maps, 3, 2, 4, top_k=1) == [(maps.keys[row.argmax()], pytest.approx(row.max()))]
    draw_attention(maps, tmp_path / "one.png", layer=3, head=0)
    with pytest.raises(ValueError, match="layer is 2; the layers with this attention are 1, 3"):
        draw_attention(maps, tmp_path / "none.png", layer=2)


def test_top_keys_are_the_keys_with_the_largest_weights():
    _, maps = maps_of(jf.DecoderConfig, "self")
    row = maps.weights[1, 2, 4]
    found = describe(maps, 1, 2, 4, top_k=2)
    assert found[0] == (maps.keys[row.argmax()], pytest.approx(row.max()))
    assert found[1][1] == pytest.approx(np.sort(row)[-2])


@pytest.mark.parametrize(
    "kind, which, message",
    [
        (jf.DecoderConfig, "cross", "'cross'; the model is a Decoder, whose attention is self"),
        (jf.RecurrentConfig, "self", "the model is a Recurrent, which has no attention"),
        (jf.EncoderDecoderConfig, "none", "whose attention is self, cross, encoder"),
    ],
)
def test_attention_maps_of_a_model_without_attention_are_refused(kind, which, message):
    with pytest.raises(ValueError, match=message):
        maps_of(kind, which)


def test_attention_pictures_have_one_panel_per_head(tmp_path):
    _, maps = maps_of(jf.DecoderConfig, "self")
    draw_attention(maps, tmp_path / "all.png")
    draw_attention(maps, tmp_path / "one.png", layer=1, head=3)
    widths = [imread(tmp_path / name).shape[1] for name in ("all.png", "one.png")]
    assert widths[0] > 1.5 * widths[1] > 300
    for layer, head, message in (
        (2, 0, "layer is 2; the layers with this attention are 0, 1"),
        (0, -1, "-1"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_attention(maps, tmp_path / "none.png", layer, head)
    assert not (tmp_path / "none.png").exists()
