"""`make_step` with each optimizer of optax and optax.contrib."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.training.batch import Batch
from jaxformer.training.step import init_state, make_step
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = jf.RecurrentConfig(vocab_size=7, max_length=4, num_layers=1, embed_dim=4)
contrib = optax.contrib
_BY_RATE = """adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage
    lamb lars lion nadam nadamw noisy_sgd novograd optimistic_gradient_descent radam rmsprop rprop
    sgd sign_sgd signum sm3 yogi"""
_CONTRIB_BY_RATE = """acprop ademamix adopt cocob dadapt_adamw dog dowg galore madgrad momo
    momo_adam muon prodigy schedule_free_adamw schedule_free_sgd simplified_ademamix"""
OPTIMIZERS = {name: partial(getattr(optax, name), 1e-3) for name in _BY_RATE.split()}
OPTIMIZERS |= {name: partial(getattr(contrib, name), 1e-3) for name in _CONTRIB_BY_RATE.split()}
OPTIMIZERS |= {
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, key=0),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-3)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-3), 1e-3),
    "sam": lambda: contrib.sam(optax.sgd(1e-3), contrib.normalize()),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(1e-3), contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize(
    "name", mostly_slow(OPTIMIZERS, "sam", slow=("prodigy", "mechanize", "momo"))
)
def test_every_optax_optimizer_makes_three_training_steps(name):
    """A step donates the whole state, so a buffer must not occur in the state twice."""
    model, optimizer = jf.build(MODEL), OPTIMIZERS[name]()
    sequences = np.random.default_rng(0).integers(0, 7, (1, 2, 5)).astype(np.int32)
    state, step = init_state(model, optimizer, 0), make_step(model, optimizer)
    for number in range(1, 4):
        state, _ = step(state, Batch(sequences[..., :-1], sequences[..., 1:]), np.float32(1.0))
        assert state.step == number
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_optax_optimizer_that_needs_extra_arguments_is_rejected():
    model, optimizer = jf.build(MODEL), optax.lbfgs()
    sequences = np.zeros((1, 2, 4), np.int32)
    state, step = init_state(model, optimizer, 0), make_step(model, optimizer)
    with pytest.raises(ValueError, match=r"arguments that make_step does not pass.*value_fn"):
        step(state, Batch(sequences, sequences))
