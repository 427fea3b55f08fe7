"""A model in Flax's nnx bridge: dropout in training, and none in evaluation."""

from functools import partial

import numpy as np
import pytest
from flax import nnx

import jaxformer as jf
from jaxformer.verify import assert_dependencies, rules
from tests.errors import error_of
from tests.properties import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.fixture
def wrapped():
    """A decoder with dropout in ToNNX, as docs/research.md writes it, and tokens."""
    model = tiny.build(kind=jf.DecoderConfig, dropout=0.5)
    tokens = tiny.tokens(0, 1, 6)
    rngs = nnx.Rngs(params=0, dropout=1)
    return nnx.bridge.ToNNX(model, rngs=rngs).lazy_init(tokens), tokens


def test_nnx_dropout_stream_gives_new_masks_at_each_call(wrapped):
    """Also inside nnx.jit. Without the stream, every call is an evaluation."""
    inside, tokens = wrapped
    for call in (inside, partial(nnx.jit(lambda model, x: model(x)), inside)):
        assert np.abs(call(tokens) - call(tokens)).max() > 1e-3
    evaluate = partial(inside, rngs=nnx.Rngs())
    np.testing.assert_array_equal(evaluate(tokens), evaluate(tokens))
    without = nnx.bridge.ToNNX(inside.to_nnx__module, rngs=nnx.Rngs(0)).lazy_init(tokens)
    np.testing.assert_array_equal(without(tokens), without(tokens))


def test_certify_rejects_nnx_models_with_dropout(wrapped):
    """The error names the way that works: `eval` does not change a Linen model."""
    inside, tokens = wrapped
    rule = rules.causal(6)
    inside.eval()
    assert "rngs=nnx.Rngs()" in error_of(assert_dependencies, inside, tokens, rule)
    found = assert_dependencies(
        lambda x: inside(x, rngs=nnx.Rngs()), tokens, rule, witnesses=("change",)
    )
    assert found.matrix.sum() == 21
