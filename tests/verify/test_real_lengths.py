"""Certificates at their usual length, in programs that are compiled as users compile them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.verify.certified_model import certified_model
from jaxformer.verify.witnesses import by_derivative
from tests.properties import tiny


@pytest.mark.slow
def test_derivatives_at_default_verification_length_match_the_masks():
    """A norm of 4,096 rows is wrong if it is broadcast over a batch: see docs/hazards.md."""
    options = {"positions": "rotary", "norm": "rms", "query_key_norm": "head"}
    model = tiny.build(**options, max_length=128, num_kv_heads=4, head_dim=8)
    subject = certified_model(model, tiny.weights(model, 0))
    x, segment_ids = subject.inputs[0], jnp.asarray(subject.segment_ids)

    def hidden(x):
        return model.apply(subject.variables, x, segment_ids, method="hidden_states")

    found = by_derivative(hidden, x, 2, np.arange(128))
    np.testing.assert_array_equal(found != 0, subject.rule.reshape(128, 128))
