"""Certificates at their usual length, in programs that are compiled as users compile them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.verify.subject import subject_of
from jaxformer.verify.witnesses import by_derivative
from tests.properties import tiny


@pytest.mark.slow
def test_derivatives_of_4096_rows_are_those_of_the_rule():
    """A norm of 4,096 rows is wrong if it is broadcast over a batch: see docs/hazards.md."""
    options = {"positions": "rotary", "norm": "rms", "query_key_norm": "head"}
    model = tiny.build(**options, max_length=128, num_kv_heads=4, head_dim=8)
    subject = subject_of(model, tiny.weights(model, 0))
    x, segments = subject.inputs[0], jnp.asarray(subject.segments)

    def hidden(x):
        return model.apply(subject.variables, x, segments, method="hidden_states")

    found = by_derivative(hidden, x, 2, np.arange(128))
    np.testing.assert_array_equal(found != 0, subject.rule.reshape(128, 128))
