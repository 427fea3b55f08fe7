"""What every stack of layers must do, for the tests that build their own."""

import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.verify import rules
from tests.properties import tiny
from tests.properties.chunks import chunked
from tests.properties.witness import exactly, jacobian


def chunks_equal_one_pass(model, seed, segment_ids, chunks):
    """Reading the texts in chunks gives the logits of one pass over them."""
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, tiny.LENGTH)
    logits, _ = chunked(model, variables, tokens, chunks, segment_ids)
    tiny.close(logits, tiny.apply(model)(variables, tokens, segment_ids), where=segment_ids != 0)


def dependencies_are_the_rules(model):
    """An output depends on exactly the inputs that the rules of the sub-layers allow."""
    x = tiny.embeddings(0, 2, tiny.LENGTH, model.config.embed_dim)
    segment_ids = np.array([[1] * 5 + [0] + [2] * (tiny.LENGTH - 6), [3] * tiny.LENGTH])
    found = jacobian(model)(tiny.weights(model, 1), x, jnp.asarray(segment_ids), None)
    exactly(found, rules.model_rule(model.config, segment_ids, layers=model.layers))


def a_saved_model_is_equal(folder, model, own=()):
    """A saved model is loaded, with the caller's own classes, and computes the same."""
    variables, tokens = tiny.weights(model, 3), tiny.tokens(3, 2, tiny.LENGTH)
    jf.save(folder, model, variables)
    loaded = jf.load(folder, layers=own)
    assert loaded.model.layers == model.layers
    tiny.close(loaded.model.apply(loaded.variables, tokens), model.apply(variables, tokens), 0.0)
