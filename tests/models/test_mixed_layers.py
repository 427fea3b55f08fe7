"""Stacks that mix attention, recurrent layers and convolutions."""

from dataclasses import replace
from functools import cache

import jax
import pytest
from hypothesis import given

import jaxformer as jf
from jaxformer.functional import (
    Convolution,
    LayerNorm,
    Lstm,
    Plain,
    Recurrent,
    Residual,
    Rnn,
)
from tests.models import own_stacks
from tests.properties import tiny
from tests.properties.chunks import cuts

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = tiny.build(num_layers=5, positions="rotary", window=4).config
ATTENTION = jf.Decoder(CONFIG).architecture.stack.layers[0]
WIDTH, LENGTH = CONFIG.embed_dim, tiny.LENGTH


@cache
def model(**options):
    """Returns a decoder with an LSTM, a dilated convolution and an RNN between its attention."""
    mixers = (Recurrent(Lstm(), WIDTH), Convolution((-4, -2, 0)), Recurrent(Rnn(), WIDTH))
    lstm, convolution, rnn = ((Residual(x, LayerNorm()), *ATTENTION[1:]) for x in mixers)
    layers = (ATTENTION, lstm, convolution, ATTENTION, rnn)
    return replace(jf.Decoder(CONFIG), layers=layers, **options)


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2), chunks=cuts())
def test_cached_chunks_through_different_layer_types_equal_one_pass(seed, segment_ids, chunks):
    own_stacks.chunks_equal_one_pass(model(), seed, segment_ids, chunks)


@pytest.mark.slow
def test_dependencies_match_the_masks_of_different_layer_types():
    own_stacks.dependencies_are_the_rules(model())


@pytest.mark.slow
def test_scanned_and_unrolled_layers_give_equal_logits():
    variables, tokens = tiny.weights(model(), 0), tiny.tokens(0, 2, LENGTH)
    scanned = replace(model(), execution=jf.Execution(layers="scan"))
    tiny.close(scanned.apply(variables, tokens), tiny.apply(model())(variables, tokens))


@pytest.mark.slow
def test_saved_model_with_different_layer_types_loads_with_equal_logits(tmp_path):
    own_stacks.a_saved_model_is_equal(tmp_path / "mixed", model())


def test_error_for_mismatched_layer_width_names_layer_and_sublayer():
    narrow = Residual(Recurrent(Lstm(), WIDTH // 2), LayerNorm())
    wrong = replace(model(), layers=(*model().layers[:4], (narrow, *ATTENTION[1:])))
    with pytest.raises(ValueError, match=r"layers\[4\]: the sub-layer 'recurrent' returns 4 feat"):
        wrong.apply(tiny.weights(model(), 0), tiny.tokens(0, 1, 3))
    with pytest.raises(ValueError, match="the last layer returns 4 features; the head reads 8"):
        alone = Plain(Recurrent(Lstm(), WIDTH // 2), LayerNorm())
        replace(model(), layers=(*model().layers[:4], (alone,))).init(
            jax.random.key(0), tiny.tokens(0, 1, 3)
        )
